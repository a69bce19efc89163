"""The benches of files and events: what they send, and that what they count is what there is."""

import asyncio
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from support.bench_requests import BASE, parts

from benches import compaction, events, files, servers
from benches.batches import EVENTS, event_batches
from benches.files import Long, LongFile, Pushes
from benches.load import measure
from benches.workloads import FILE_BYTES, FILES, WORKLOADS, Author
from pysync.cli.load_generator import Measurement

BATCHES = 12


def run(server: servers.Running, workload: str, count: int) -> Measurement:
    return asyncio.run(measure(server.url, WORKLOADS[workload], count=count, seconds=30))


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Running]:
    with servers.pysync() as server:
        yield server


@contextmanager
def event_server(folder: Path) -> Iterator[servers.Running]:
    with servers.serving(folder, config=servers.EVENTS) as server:
        yield server


@pytest.mark.process
@pytest.mark.parametrize("name", ["file-pull", "file-pull-304", "file-push"])
def test_workloads_of_files_are_answered_in_full(server: servers.Running, name: str) -> None:
    found = run(server, name, 20)
    assert (found.answers, found.errors) == (20, {})


@pytest.mark.process
def test_a_file_that_is_cut_short_is_an_error(server: servers.Running) -> None:
    def a_part(author: Author, count: int) -> list[bytes]:
        path = parts(WORKLOADS["file-pull"].prepare(author)[0])[1].replace("/push/", "/pull/")
        return [author.request(path, headers=f"Range: bytes=0-{FILE_BYTES - 2}\r\n")] * count

    short = dataclasses.replace(WORKLOADS["file-pull"], requests=a_part, expect=206)
    found = asyncio.run(measure(server.url, short, count=5, seconds=30))
    assert found.errors == {"too short": 5}


def test_files_are_of_one_size_and_every_push_makes_one_of_its_own() -> None:
    author = Author(BASE)
    prepared = WORKLOADS["file-pull"].prepare(author)
    pushed = [*prepared, *WORKLOADS["file-push"].requests(author, 20)]
    for method, _, headers, body in map(parts, pushed):
        assert (method, headers["Content-Type"]) == ("POST", "application/octet-stream")
        assert len(body) == FILE_BYTES == int(headers["Content-Length"])
    assert len({parts(request)[1] for request in pushed}) == FILES + 20


def test_plain_files_are_whole_and_shared_out_to_all_writers(tmp_path: Path) -> None:
    assert files.written_plainly(tmp_path / "plain", writers=2, files=3) > 0
    assert [file.stat().st_size for file in (tmp_path / "plain").iterdir()] == [FILE_BYTES] * 3


@pytest.mark.process
def test_pushes_are_measured_beside_plain_files() -> None:
    found = files.pushes(clients=2, files=4)
    assert found.mb_per_second > 0 < found.plain_mb_per_second
    assert found.server_cpu_us > 0 < found.p50_ms <= found.p99_ms
    told = files.push_table({2: [Pushes(125.0, 200.0, 100.0, 1_500.0, 2.0, 3.0)]})
    shares = "0.80 (0.80 to 0.80) | 0.6 | 0.50 (0.50 to 0.50)"
    assert f"| 2 | 125 | 200 | 100 | {shares} | 1500 | 2.00 | 3.00 |" in told


def test_a_push_that_is_refused_is_not_timed(server: servers.Running) -> None:
    with pytest.raises(RuntimeError, match=r"a file is refused: .*40[04]"):
        files.push_each(server, Author(server.url), ["a//b"])


@pytest.mark.process
def test_long_files_come_back_as_they_went_and_memory_is_watched() -> None:
    found = files.long_transfers(mebibytes=3, times=1)
    assert [each.way for each in found] == ["up", "down"]
    assert all(each.seconds > 0 and each.grown_mib >= 0 for each in found)
    told = files.long_table([Long("up", 2.0, 7.25), Long("down", 1.0, 0.5)], mebibytes=100)
    assert "| up | 52 (52 to 52) | 7.2 (7.2 to 7.2) |" in told


def test_a_long_file_that_comes_back_as_another_is_noticed(server: servers.Running) -> None:
    LongFile(2).push(server, "files/other")
    other = LongFile(2)
    other._blocks.reverse()
    with pytest.raises(RuntimeError, match="comes back as another"):
        other.pull(server, "files/other")
    with pytest.raises(RuntimeError, match="answered 200"):
        other.push(server, "files/other")
    with pytest.raises(RuntimeError, match="answered 200, "):
        LongFile(1).pull(server, "files/other")


def test_batches_hold_a_hundred_events_and_no_event_comes_twice() -> None:
    bodies = list(event_batches(300))
    found = [orjson.loads(body)["data"]["events"] for body in bodies]
    assert {len(batch) for batch in found} == {EVENTS} == {100}
    ids = [event["message_id"] for batch in found for event in batch]
    assert len(set(ids)) == len(ids)
    assert all(33_000 < len(body) < 35_000 for body in bodies)
    assert {len(event) for batch in found for event in batch} == {10}


@pytest.mark.process
def test_batches_are_measured_and_every_one_is_on_disk(tmp_path: Path) -> None:
    with event_server(tmp_path) as server:
        found = events.measure(server, 30, 4, BATCHES)
        assert found.load.answers == BATCHES
        gaps = found.gaps
        assert 0 < gaps.wall(0.5) <= gaps.wall(0.99) <= gaps.wall_ms[-1]
        assert len(gaps.cpu_ms) == len(gaps.wall_ms)
        assert len(server.gaps().wall_ms) < len(gaps.wall_ms) + 1_000, "what was told is not told again"
    stored = events.stored(tmp_path, BATCHES)
    assert stored.files == BATCHES
    assert f"| bytes of a file | {stored.bytes / BATCHES:,.0f} |" in events.table([found], stored)
    next(tmp_path.glob("files/**/*.parquet")).unlink()
    with pytest.raises(RuntimeError, match=f"{BATCHES - 1} files hold"):
        events.stored(tmp_path, BATCHES)


@pytest.mark.process
def test_a_query_is_timed_over_all_events_before_they_are_merged_and_after(tmp_path: Path) -> None:
    compaction.push(tmp_path, BATCHES)
    before = compaction.ask(tmp_path, times=2)
    assert (len(before.seconds), before.files) == (2, BATCHES)
    compaction.check(before, BATCHES)
    with pytest.raises(RuntimeError, match="were counted"):
        compaction.check(before, BATCHES + 1)
    assert compaction.compact(tmp_path) > 0
    after = compaction.ask(tmp_path, times=2)
    assert (after.rows, after.files) == (before.rows, 1)


def test_how_much_faster_a_query_gets_is_told() -> None:
    before = compaction.Asked([1.0, 2.0, 3.0], [("a", 60), ("b", 40)], 9, 3_000_000)
    after = compaction.Asked([0.01, 0.02, 0.03], before.rows, 1, 1_000_000)
    told = compaction.table(before, after, 1.25)
    assert "| files | 9 | 1 |" in told
    assert "The query is 100 (50 to 150) times as fast after; goal: at least 20. Merging took\n1.2 s." in told
