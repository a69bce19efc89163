"""The repository around the code: version, extras, changelog, Makefile and the tools that it runs."""

import importlib.metadata
import json
import os
import platform
import pty
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import pysync
from pysync import _build
from pysync.config import load
from pysync.extras import EXTRA_OF
from tools.archive import AUTHORITIES, adapt

ROOT = Path(__file__).resolve().parents[2]
CARGO = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


# Version


def test_cargo_toml_is_the_one_source_of_the_version() -> None:
    installed = importlib.metadata.version("pysync")
    assert pysync.__version__ == installed == CARGO["version"].replace("-dev", ".dev")
    assert PROJECT["dynamic"] == ["version"]


def test_the_changelog_begins_with_the_version() -> None:
    first = re.search(r"^## \[(.+)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    number, *suffix = CARGO["version"].split("-")
    assert first is not None
    assert first[1] == number
    assert (first[2] == "unreleased") == bool(suffix)


def test_no_source_file_repeats_the_version() -> None:
    for path in (*ROOT.glob("pysync/**/*.py"), *ROOT.glob("rust/*.rs"), ROOT / "pyproject.toml"):
        assert not re.search(r"version\w* *= *['\"]\d+\.\d+\.\d+", path.read_text()), path


# Extras

# Runs the command line as if the packages of the extras were not installed.
WITHOUT_EXTRAS = """
import sys
from pysync.extras import EXTRA_OF
sys.modules.update(dict.fromkeys(EXTRA_OF))
import pysync.client.sealed, pysync.server.process.serve
from pysync.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

NEEDING: dict[str, dict[str, Any]] = {
    "s3": {"store": "s3://bucket/prefix"},
    "redis": {"store": "memory:", "coordinator": "redis://127.0.0.1:6379/0"},
    "schema": {"collections": [{"name": "n", "storagePath": "n/{id}", "objectSchema": {}}]},
    "parquet": {
        "collections": [{"name": "e", "storagePath": "e/{id}"}],
        "events": [{"collection": "e", "storagePath": "e/{id}", "compactEveryMs": 3_600_000}],
    },
}


def run_without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", each)[0] for each in requirements}


def test_every_extra_is_one_of_all_and_no_part_of_the_base() -> None:
    optional = PROJECT["optional-dependencies"]
    features = set(EXTRA_OF.values())
    assert set(optional) >= {*features, "all", "dev"}
    assert optional["all"] == [f"pysync[{','.join(sorted(features))}]"]
    assert "pysync[all]" in optional["dev"]
    for extra in features:
        assert not names_of(PROJECT["dependencies"]) & names_of(optional[extra])


@pytest.mark.process
def test_base_has_client_server_and_folder_store_without_any_extra(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"version": 1, "store": f"file:{tmp_path}/data"}))
    ran = run_without_extras("check", str(config), "--probe")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.process
@pytest.mark.parametrize("extra", sorted(NEEDING))
def test_configuration_that_needs_a_missing_extra_names_the_command_that_installs_it(
    tmp_path: Path, extra: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"version": 1, "store": "memory:", **NEEDING[extra]}))
    ran = run_without_extras("check", str(config))
    assert ran.returncode == 1
    assert f"{sys.executable} -m pip install 'pysync[{extra}]'" in ran.stdout + ran.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["verify", "--store", "s3://bucket/prefix"], "s3"),
        (["events", "compact", "--config", "events.json"], "parquet"),
    ],
)
def test_command_that_needs_a_missing_extra_names_the_command_that_installs_it(
    command: list[str], extra: str
) -> None:
    ran = run_without_extras(*command)
    assert ran.returncode == 1
    assert f"-m pip install 'pysync[{extra}]'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.process
def test_archive_names_the_extra_that_it_lacks_and_what_has_it() -> None:
    """Nothing can be installed into its Python."""
    code = (
        "import sys; sys.frozen, sys.modules['duckdb'] = True, None; from pysync.extras import require; "
        "require('the command', 'duckdb')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the extra 'parquet', which this archive lacks. Install pysync from its wheel" in ran.stderr


@pytest.mark.process
def test_events_are_stored_without_any_extra(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    section = {"collection": "e", "storagePath": "e/{id}"}
    config.write_text(
        json.dumps({"version": 1, "store": "memory:", **NEEDING["parquet"], "events": [section]})
    )
    ran = run_without_extras("check", str(config))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_configuration_with_all_extras_installed_is_accepted(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for needing in NEEDING.values():
        config.write_text(json.dumps({"version": 1, "store": "memory:", **needing}))
        assert load(config, {})


# Changelog

KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_the_changelog_keeps_its_format() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert lines[0] == "# Changelog"
    versions = [line[3:] for line in lines if line.startswith("## ")]
    for version in versions:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d{2}-\d{2}|unreleased)", version), version
    numbers = [tuple(map(int, re.findall(r"\d+", version)[:3])) for version in versions]
    assert numbers == sorted(numbers, reverse=True)
    for section in re.split(r"^## ", "\n".join(lines), flags=re.M)[1:]:
        kinds = re.findall(r"^### (.*)", section, re.M)
        assert set(kinds) <= set(KINDS)
        assert len(kinds) == len(set(kinds)), "each kind comes once in a version"


# Makefile


def make(*arguments: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "RUSTFLAGS")
    }
    ran = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return ran.stdout


@pytest.mark.process
def test_make_help_lists_every_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.M)
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.M))
    listed = re.findall(r"^make ([\w-]+) +\S", make("help"), re.M)
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == targets == set(phony.split())


@pytest.mark.process
@pytest.mark.process
def test_deeper_test_of_a_long_run_is_marked_long() -> None:
    """However a test asks for its depth: in its body, in a decorator, or by way of hypothesis."""
    grown = {
        "tests/engine/test_history_model.py": "test_killed_processes_lose_no_version_in_a_folder",
        "tests/migrate/test_garbage.py": "test_nothing_is_lost_while_nodes_write_and_crash",
        "tests/core/test_core_store_key.py": "test_a_key_is_split_or_rejected_as_by_the_twin",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "long", "--collect-only", *grown]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path, name in grown.items():
        assert f"{path}::{name}" in found


def test_make_alone_builds_for_development() -> None:
    assert make("-n", "-W", "pyproject.toml") == make("-n", "-W", "pyproject.toml", "build")
    assert "'.[dev,docs]'" in make("-n", "-W", "pyproject.toml")


@pytest.mark.process
def test_portable_build_is_the_default() -> None:
    flags = ("-s", "--eval", "flags: ; @echo $(RUSTFLAGS)", "flags")
    assert make(*flags).strip() == ""
    assert "target-cpu=native" in make(*flags, "NATIVE=1")
    settings = tomllib.loads((ROOT / ".cargo/config.toml").read_text())["target"]
    assert 'curve25519_dalek_backend="avx512"' in settings['cfg(target_arch = "x86_64")']["rustflags"]


def test_sdist_holds_what_the_extension_is_built_with() -> None:
    maturin = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["maturin"]
    assert {"path": ".cargo/config.toml", "format": "sdist"} in maturin["include"]


def test_an_extension_older_than_its_sources_is_not_imported() -> None:
    with pytest.raises(ImportError, match="run `make build`"):
        _build.check("the digest of older sources")


@pytest.mark.process
def test_only_a_terminal_sees_how_long_a_command_takes() -> None:
    command = [str(ROOT / "tools/elapsed"), "sh", "-c", "echo built; exit 3"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "built\n", "")
    main, terminal = pty.openpty()
    assert subprocess.run(command, stdout=terminal, stderr=terminal, check=False).returncode == 3
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # nobody writes any more
        while more := os.read(main, 1000):
            shown += more
    os.close(main)
    assert re.search(rb"\r\d+ s\r\n$", shown)


def test_check_leaves_the_built_extension_alone() -> None:
    """Cargo would build the dependencies anew for `make build` if other commands used its folder."""
    for command in re.findall(r"^\tcargo (?:clippy|test).*", MAKEFILE, re.M):
        assert "--release" not in command


# Archive


def program_of_the_archive(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/archive.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_program_of_the_archive_is_pysync_and_runs_modules() -> None:
    assert program_of_the_archive("--version").stdout == f"pysync {pysync.__version__}\n"
    ran = program_of_the_archive("-m", "platform", "--terse")
    assert (ran.returncode, ran.stdout) == (0, f"{platform.platform(terse=True)}\n")


@pytest.mark.process
@pytest.mark.parametrize("own", [None, "/opt/lib"])
def test_program_of_the_archive_gives_other_programs_their_own_libraries(own: str | None) -> None:
    environment = {"LD_LIBRARY_PATH": "/archive/_internal"}
    if own is not None:
        environment["LD_LIBRARY_PATH_ORIG"] = own
    adapted = dict(environment)
    adapt(adapted)
    assert adapted == ({} if own is None else {"LD_LIBRARY_PATH": own})


@pytest.mark.process
def test_program_of_the_archive_finds_the_authorities_of_other_systems(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text("import os; print(os.environ.get('SSL_CERT_FILE'))")
    ran = program_of_the_archive("-m", "probe", PYTHONPATH=str(tmp_path), SSL_CERT_DIR=str(tmp_path / "none"))
    built_in = ssl.get_default_verify_paths().openssl_cafile
    there = [path for path in AUTHORITIES if Path(path).exists() and not Path(built_in).exists()]
    assert ran.stdout == f"{there[0] if there else None}\n"
    own = program_of_the_archive("-m", "probe", PYTHONPATH=str(tmp_path), SSL_CERT_FILE="/mine.pem")
    assert own.stdout == "/mine.pem\n"


# Toolchain


@pytest.fixture
def toolchain(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs tools/toolchain where only the given programs exist: name -> the shell script that it is."""

    def run(*arguments: str, **programs: str) -> subprocess.CompletedProcess[str]:
        for name in ("sh", "sed", "dirname", "rm"):
            (tmp_path / name).symlink_to(shutil.which(name) or name)
        for name, script in {
            "cc": "exit 0",
            "cargo": "exit 0",
            "rustc": "echo rustc 1.95.0",
            **programs,
        }.items():
            path = tmp_path / name.replace("_", ".")
            path.write_text(f"#!{tmp_path}/sh\n{script}\n")
            path.chmod(0o755)
        return subprocess.run(
            [ROOT / "tools/toolchain", *arguments],
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


Toolchain = Callable[..., subprocess.CompletedProcess[str]]
SHIM = "echo 'pyenv: command not found' >&2; exit 127"
NO_VENV = 'case "$2" in *venv*) exit 1;; esac'


@pytest.mark.process
def test_the_newest_python_that_works_is_chosen(toolchain: Toolchain) -> None:
    ran = toolchain(python3_14=SHIM, python3_13=NO_VENV, python3_12="exit 0", python3_11="exit 0")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "python3.12\n", "")


@pytest.mark.process
def test_requested_python_is_taken_or_rejected(toolchain: Toolchain) -> None:
    ran = toolchain("mine", mine="exit 1", python3_12="exit 0")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "mine is not a Python from 3.11 to 3.14" in ran.stderr


@pytest.mark.process
def test_everything_that_is_missing_is_named_at_once(toolchain: Toolchain) -> None:
    ran = toolchain(cargo="exit 127", cc="exit 1", python3="exit 1")
    assert (ran.returncode, ran.stdout) == (1, "")
    for missing in ("Python from 3.11 to 3.14 is missing", "Rust is missing", "A C linker is missing"):
        assert missing in ran.stderr


@pytest.mark.process
def test_python_without_venv_names_the_package_that_has_it(toolchain: Toolchain) -> None:
    assert (
        "python3 lacks the module venv or ensurepip. On Debian: apt install python3-venv"
        in toolchain(python3=NO_VENV).stderr
    )


@pytest.mark.process
def test_rust_that_is_too_old_is_named_with_what_is_needed(toolchain: Toolchain) -> None:
    ran = toolchain(python3="exit 0", rustc="echo 'rustc 1.85.1 (x 2025-01-01)'")
    assert ran.returncode == 1
    assert f"Rust {CARGO['rust-version']} or newer is needed; this is rustc 1.85.1" in ran.stderr


# Pages of the repository


def test_pre_commit_runs_what_make_check_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "nothing is downloaded"
    for hook in repository["hooks"]:
        tool = hook["entry"].replace(".venv/bin/", "$(BIN)/").replace(" --fix", "")
        assert tool in MAKEFILE


def test_readme_says_that_there_is_no_licence() -> None:
    assert not list(ROOT.glob("LICEN[SC]E*"))
    assert "licence" in (ROOT / "README.md").read_text()
    assert "license" not in PROJECT


def test_security_page_names_no_address() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    assert not re.search(r"\S@\S|mailto:", page)
    for heading in ("Supported versions", "Report a vulnerability", "Threat model"):
        assert f"\n## {heading}\n" in page
