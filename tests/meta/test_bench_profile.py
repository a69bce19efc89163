"""The profile of requests: its parts add up, and it sees what the server does."""

import asyncio
from pathlib import Path

import pytest

import pysync
from benches import request_profile, sampler
from benches.request_profile import Profile
from pysync.server.connection import Connection


@pytest.mark.process
@pytest.mark.slow
def test_samples_of_a_server_are_of_its_functions(tmp_path: Path) -> None:
    found, answers = request_profile.sample("pull", 1.0, tmp_path / "samples.json")
    assert answers > 0
    assert 0.0 < found.main_s <= found.all_s
    stages = {request_profile.stage_of(name) for name in found.functions}
    assert stages
    assert stages <= set(request_profile.STAGES)


def test_functions_are_named_by_module() -> None:
    assert sampler.function_of(Connection.abort.__code__) == "pysync/server/connection Connection.abort"
    assert sampler.function_of(asyncio.run.__code__) is None


def test_every_module_of_the_server_side_has_a_stage() -> None:
    package = Path(pysync.__file__).parent
    for folder in ("server", "auth", "coordinator", "engine", "store", "sqlite"):
        for path in (package / folder).rglob("*.py"):
            name = str(path.relative_to(package.parent).with_suffix(""))
            assert request_profile.stage_of(f"{name} f") != request_profile.OTHER


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("[kernel.kallsyms]", "kernel"),
        ("python3.11", "Python"),
        ("libpython3.12.so.1.0", "Python"),
        ("_core.abi3.so", "Rust core"),
        ("loop.cpython-311-x86_64-linux-gnu.so", "uvloop"),
        ("_http_parser.cpython-311-x86_64-linux-gnu.so", "aiohttp"),
        ("libsqlite3.so.0.8.6", "SQLite"),
        ("_sqlite3.cpython-311-x86_64-linux-gnu.so", "SQLite"),
        ("libc.so.6", "C library"),
        ("_multidict.cpython-311-x86_64-linux-gnu.so", "other"),
    ],
)
def test_shared_objects_belong_to_a_library(name: str, library: str) -> None:
    assert request_profile.library_of(name) == library


def test_a_profile_is_shown_with_and_without_libraries() -> None:
    found = Profile(30.0, 5.0, {"store": 25.0}, {"pysync/store/local/store f": 25.0})
    assert "| store | 25.0 |" in request_profile.table({"pull": found}, {})
    assert "library" not in request_profile.table({"pull": found}, {})
    assert "25.0" in request_profile.functions_table("pull", found, 3)
    seen = {"bare-get": {"kernel": 9.0}, "pull": {"kernel": 12.0, "Python": 18.0}}
    shown = request_profile.table({"pull": found}, seen)
    assert "| kernel | 9.0 | 12.0 |" in shown
    assert shown.endswith("| all of it | 9.0 | 30.0 |")
