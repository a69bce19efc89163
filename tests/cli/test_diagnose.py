"""`pysync check --probe`: a configuration, checked against the real thing."""

import itertools
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
from components import S3Server, free_port
from components.fixtures import StartRedis
from support.append_log_nodes import keys_below
from support.cli_runner import Shell
from support.collections import collection
from support.s3_fault_proxy import FaultProxy

from pysync import config
from pysync.config import Problem
from pysync.coordinator import open_coordinator
from pysync.diagnose import Report, probe_machine, probe_stores
from pysync.store import open_store
from pysync.store.local.store import LocalStore

COLLECTIONS = [collection("notes")]
DURATION = r"\d+\.\d ms, at worst \d+\.\d ms"


async def check(shell: Shell, **members: Any) -> tuple[int, str]:
    """Exit status, and what is printed after the routes of a configuration with these members."""
    Path("service.json").write_text(json.dumps({"version": 1, "collections": COLLECTIONS, **members}))
    status, output, errors = await shell.run_async("check", "service.json", "--probe")
    assert errors == ""
    routes, _, found = output.partition("\nPROBE")
    assert "POST    /push/notes/{id}" in routes
    return status, "PROBE" + found


def in_bucket(server: S3Server, prefix: str = "") -> dict[str, Any]:
    store = server.store(prefix or f"probe/{os.urandom(6).hex()}")
    return {
        "url": store.url,
        "endpoint": store.endpoint,
        "region": store.region,
        "forcePathStyle": True,
        "accessKeyId": store.access_key_id,
        "secretAccessKey": store.secret_access_key,
    }


async def test_folder_is_opened_queried_and_left_as_it_was(shell: Shell, tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    status, found = await check(shell, store="file:data")
    assert status == 0
    lines = found.splitlines()
    assert re.fullmatch(r"PROBE +FOUND", lines[0])
    expected = [
        ("store", "file:data"),
        ("store quick_check", "nothing found"),
        ("store conditions", "honoured"),
        ("store put", DURATION),
        ("store get", DURATION),
        ("coordinator", "file:"),
        ("coordinator", "does not exist yet: the first start creates it"),
        ("store space", r"\d+\.\d of \d+\.\d GB free"),
        ("store mode", "0700"),
        ("open files", r"[\d,]+ at most"),
    ]
    for line, (subject, finding) in zip(lines[1:], expected, strict=True):
        assert re.fullmatch(f"{subject} +{finding}", line)
    assert await keys_below(store, "") == []
    await store.close()


async def test_nothing_is_made_that_a_first_start_would_make(shell: Shell, tmp_path: Path) -> None:
    status, found = await check(shell, store="file:deep/data")
    assert (status, found.count("does not exist yet: the first start creates it")) == (0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["service.json"]


async def test_coordinator_in_a_folder_of_its_own_is_queried_there(shell: Shell, tmp_path: Path) -> None:
    await (await open_coordinator(f"file:{tmp_path}/own", None)).close()
    status, found = await check(shell, store="file:data", coordinator=f"file:{tmp_path}/own")
    assert (status, found.count("does not exist yet")) == (0, 1)
    assert re.search(f"^coordinator claim +{DURATION}$", found, re.M)


async def test_memory_has_nothing_that_could_be_wrong(shell: Shell) -> None:
    status, found = await check(shell, store="memory:")
    assert status == 0
    assert re.search(f"coordinator claim +{DURATION}", found)


async def test_unopenable_store_is_a_problem(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("a file")
    status, found = await check(shell, store="file:note", coordinator="file:note")
    assert status == 1
    assert found.endswith(
        f"2 problems\n\n  store        {tmp_path}/note is not a folder\n"
        f"  coordinator  {tmp_path}/note is not a folder\n"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pysync.db").write_bytes(b"not a database, and longer than its header" * 100)
    status, found = await check(shell, store="file:data", coordinator="memory:")
    assert status == 1
    assert "  store  cannot open the store in data: " in found


async def test_the_configuration_alone_is_checked_first(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "service.json").write_text('{"version": 1, "stroe": "memory:"}')
    status, output, _ = shell.run("check", "service.json", "--probe")
    assert status == 1
    assert "PROBE" not in output


async def test_median_and_maximum_of_ten_are_reported() -> None:
    seconds = [value for n in range(1, 100) for value in (0.0, n / 1000)]
    findings, settings = Report(), config.parse({"version": 1, "store": "memory:"})
    await probe_stores(settings, findings, timer=itertools.chain(seconds).__next__)
    assert dict(findings.rows)["store put"] == "5.5 ms, at worst 10.0 ms"
    assert dict(findings.rows)["store get"] == "15.5 ms, at worst 20.0 ms"


def test_differing_clocks_are_reported_with_a_warning() -> None:
    findings = Report()
    for skew_ms in (-900, 2_000, -61_000):
        findings.add_clock_skew("store", skew_ms)
    assert [finding for _, finding in findings.rows] == [
        "as this machine's",
        "this machine's is 2 s ahead",
        "this machine's is 61 s behind",
    ]
    assert findings.warnings == [Problem("store", "the clocks differ: this machine's is 61 s behind; set it")]


@pytest.mark.parametrize("name", ["radosgw", "moto"])
async def test_bucket_and_redis_are_opened_queried_and_left_as_they_were(
    name: str, request: pytest.FixtureRequest, start_redis: StartRedis, shell: Shell
) -> None:
    server: S3Server = request.getfixturevalue(name)
    redis = start_redis("--requirepass", "hush")
    coordinator = f"redis://:hush@127.0.0.1:{redis.port}/0"
    prefix = f"probe/{os.urandom(6).hex()}"
    status, found = await check(shell, store=in_bucket(server, prefix), coordinator=coordinator)
    assert status == 0
    for row in (
        rf"store +s3://{server.bucket}/{prefix}",
        "store conditions +honoured",
        "store clock +as this machine's",
        f"store put +{DURATION}",
        f"store get +{DURATION}",
        rf"coordinator +redis://127\.0\.0\.1:{redis.port}/0",
        f"coordinator claim +{DURATION}",
        "coordinator clock +as this machine's",
    ):
        assert re.search(f"^{row}$", found, re.M), row
    assert "hush" not in found
    above = await open_store(server.store())
    assert [key for key in await keys_below(above, "") if key.startswith(prefix)] == []
    await above.close()


async def test_unusable_bucket_and_redis_are_reported_with_the_reason(
    radosgw: S3Server, shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    port = free_port()
    store = {**in_bucket(radosgw), "secretAccessKey": "another"}
    status, found = await check(shell, store=store, coordinator=f"redis://127.0.0.1:{port}/0")
    assert status == 1
    assert "2 problems" in found
    assert "the secret key is not that of the access key" in found
    assert re.search(rf"^  coordinator  redis at 127\.0\.0\.1:{port}, database 0: ", found, re.M)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_bucket_that_ignores_conditions_is_for_one_process(
    moto: S3Server, shell: Shell, caplog: pytest.LogCaptureFixture, tmp_path: Path, workers: int
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with FaultProxy(moto.endpoint) as proxy:
        proxy.drop_header("If-None-Match")
        proxy.drop_header("If-Match")
        store = {**in_bucket(moto), "endpoint": proxy.url}
        coordinator = f"file:{tmp_path}/coordinator"
        status, found = await check(shell, store=store, coordinator=coordinator, server={"workers": workers})
    if workers == 1:
        assert status == 0
        assert re.search("^store conditions +If-None-Match and If-Match ignored$", found, re.M)
        assert (
            "1 warning\n\n  store  If-None-Match and If-Match ignored: one process alone may serve" in found
        )
    else:
        assert status == 1
        assert "ignores If-None-Match and If-Match: it cannot be served by more than one process" in found


def test_machine_without_room_or_descriptors_is_reported(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "data").chmod(0o755)
    findings = Report()
    settings = {"store": f"file:{tmp_path}/data", "server": {"maxConnections": 2**53 - 1}}
    probe_machine(config.parse({"version": 1, **settings}), findings)
    found = {problem.message.partition(":")[0] for problem in findings.warnings if problem.path != "server"}
    assert found == {f"other users may enter {tmp_path}/data"}
    (limit,) = (problem.message for problem in findings.warnings if problem.path == "server")
    assert "fewer than maxConnections and maxStreams together" in limit
    full = Report()
    probe_machine(config.parse({"version": 1, "store": "file:/proc"}), full)  # a file system without room
    assert Problem("store", "/proc has less than 1 GiB of free space") in full.warnings
