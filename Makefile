# What people and CI use. Each target does its own set-up on a fresh machine.
#   make serve   set all up and serve on 127.0.0.1:8080
#   make test       every test, in parallel
#   make test-fast  those that need no process, no other server and no second of time
#   make test-long  proofs, properties and requests made from the description, at full depth
#   make check   linters, types, stubs, Rust tests
#   make bench   the speed figures of benches/RESULTS.md
#   make docs    the documentation as a static site, in target/site
#   make build   .venv with the release extension and every dependency
#   make reference  write the generated pages of docs/reference/ and the JSON Schema of the configuration
#   make lock    resolve the Python pins anew

PYTHON ?= python3.11
# The extension is built for the machine it runs on: its Ed25519 uses AVX-512 where there is one.
# `make clean build RUSTFLAGS=` builds a portable one. SHA-256 looks for its instructions when it runs, and has
# them in functions of their own: compiled into code with AVX they are a hundred times slower on some Intel ones.
export RUSTFLAGS ?= -C target-cpu=native -C target-feature=-sha
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1
BIN := .venv/bin
STAMP := .venv/.built
# Tests wait a good part of their time, for servers, for time limits and for each other.
JOBS ?= $(shell expr $$(nproc) + 1)
PYTEST := $(BIN)/pytest -q -n $(JOBS) --dist worksteal
# Each of the processes that tests start would compile pysync anew.
unexport PYTHONDONTWRITEBYTECODE
RUST := Makefile Cargo.toml Cargo.lock $(wildcard rust/*.rs)

.PHONY: serve test test-fast test-long check bench docs build reference lock clean

serve: build
	$(BIN)/pysync serve --config deploy/example.json

test: build
	tests/components/install
	$(PYTEST)

test-fast: build
	$(PYTEST) -m "not process and not component and not slow"

test-long: build
	tests/components/install
	PYSYNC_LONG_TESTS=1 $(PYTEST) -m long -o timeout=1800

check: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest pysync._core
	cargo fmt --check
	cargo clippy --release --all-targets --features python -- -D warnings
	cargo test --release --quiet

bench: build
	$(BIN)/python benches/run.py

docs: build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: $(STAMP)

reference: build
	$(BIN)/python -m tools.reference

$(STAMP): pyproject.toml constraints.txt $(RUST)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q maturin
	rm -f pysync/_core*.so
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin develop --release --quiet --extras dev,docs
	touch $(STAMP)

lock:
	rm -rf .venv && $(PYTHON) -m venv .venv
	PIP_CONSTRAINT= $(BIN)/pip install -q maturin
	PIP_CONSTRAINT= VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin develop --release --quiet --extras dev,docs
	$(BIN)/pip freeze --exclude-editable | grep -v '^pysync' > constraints.txt
	touch $(STAMP)

clean:
	rm -rf .venv target pysync/_core*.so
