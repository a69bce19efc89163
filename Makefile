# What people and CI use: `make help` lists the targets. Each does its own set-up on a fresh machine.

# The Python to build with, for example PYTHON=python3.12. Empty: the newest from 3.11 to 3.14 that works.
PYTHON ?=
# The extension runs on every machine of its architecture: SHA-256, Ed25519 and XXH3 choose their instructions
# at run time (.cargo/config.toml). NATIVE=1 compiles everything else for this machine as well. It leaves out the
# SHA instructions, which sha2 keeps in functions of their own: compiled into code with AVX they are a hundred
# times slower on some Intel processors.
NATIVE ?=
ifeq ($(NATIVE),1)
export RUSTFLAGS := -C target-cpu=native $(if $(filter x86_64,$(shell uname -m)),-C target-feature=-sha)
endif
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1
BIN := .venv/bin
BUILT := .venv/.built$(NATIVE:1=-native)
SERVABLE := .venv/.servable$(NATIVE:1=-native)
SOURCES := pyproject.toml constraints.txt Cargo.toml Cargo.lock .cargo/config.toml $(wildcard rust/*.rs)
# Tests wait a good part of their time, for servers, for time limits and for each other.
JOBS ?= $(shell expr $$(nproc) + 1)
PYTEST := $(BIN)/pytest -q -n $(JOBS) --dist worksteal
# Each of the processes that tests start would compile pysync anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := build
.PHONY: build serve test test-fast test-long coverage check bench docs reference dist audit lock clean help

build: $(BUILT)  ## install pysync, all extras and the development tools into .venv (NATIVE=1, PYTHON=python3.12)

serve: $(if $(wildcard $(BUILT)),$(BUILT),$(SERVABLE))  ## serve deploy/example.json on 127.0.0.1:8080 (PORT=8090)
	$(BIN)/pysync serve --config deploy/example.json $(if $(PORT),--port $(PORT))

test: build  ## run every test, in parallel (JOBS=3)
	tests/components/install
	$(PYTEST)

test-fast: build  ## run the tests that need no process, no other server and no second of time
	$(PYTEST) -m "not process and not component and not slow"

test-long: build  ## run proofs, properties and requests made from the description, at full depth
	tests/components/install
	TESTS_LONG=1 $(PYTEST) -m long -o timeout=1800

coverage: build  ## report the lines of pysync/ and rust/ that the tests run
	tests/components/install
	JOBS=$(JOBS) tools/coverage

check: build  ## run the linters, type checks, stub check and Rust tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/oxlint pysync/web deploy/examples
	$(BIN)/mypy
	$(BIN)/stubtest pysync._core
	cargo fmt --check
	cargo clippy --all-targets --features python -- -D warnings
	cargo test --quiet

bench: build  ## measure the speed figures of benches/RESULTS.md
	$(BIN)/python benches/run.py

docs: build  ## build the documentation as a static site in target/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: build  ## write the generated pages of docs/reference, the JSON Schema and the performance chart
	$(BIN)/python -m tools.reference

dist: build  ## build sdist, wheel and archive into dist/, and test them in empty environments
	tests/components/install
	tools/dist

audit: build  ## look for known vulnerabilities in the pinned dependencies
	tools/audit

lock: clean  ## resolve the pins of constraints.txt anew
	$(MAKE) build PIP_CONSTRAINT=
	$(BIN)/pip freeze --exclude-editable | grep -v '^pysync' > constraints.txt
	touch $(BUILT)

clean:  ## delete .venv and everything that was built
	rm -rf .venv target dist pysync/_core*.so

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Installs pysync as an editable package with these extras, and its release extension. Cargo compiles that once: the
# linters and tests of `make check` have other settings (Python, optimisation), and so a folder of their own in target/.
define install
@python=$$(tools/toolchain $(PYTHON)) || exit 1; $(BIN)/python -c '' 2>/dev/null || $$python -m venv --clear .venv
@rm -f .venv/.built* .venv/.servable* pysync/_core*.so
@$(BIN)/pip install maturin
@echo "building the extension and installing pysync[$(1)]: one to three minutes"
@PATH="$(CURDIR)/$(BIN):$$PATH" tools/elapsed $(BIN)/pip install --no-build-isolation --editable '.[$(1)]'
@touch $@
endef
COMMA := ,

$(BUILT): $(SOURCES)
	$(call install,dev$(COMMA)docs)

$(SERVABLE): $(SOURCES)
	$(call install,parquet$(COMMA)schema)
