"""The benches of append-only logs: what they send, and that what they count is what there is."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import create_server

import orjson
import pytest
from support.bench_requests import BASE, parts

from benches import append_log, servers
from benches.load import measure
from benches.workloads import (
    ELEMENT_BYTES,
    ELEMENT_DATA_BYTES,
    LOGS,
    TAIL,
    WORKLOADS,
    Author,
    append_body,
    element_data,
)
from pysync._core import canonicalize, verify_author
from pysync.auth import signing
from pysync.cli.load_generator import Measurement
from pysync.sqlite.database_file import Schema, connect_writer, create_database

NOW_MS = 1_763_700_000_000


def run(server: servers.Running, workload: str, count: int) -> Measurement:
    return asyncio.run(measure(server.url, WORKLOADS[workload], count=count, seconds=30))


@pytest.mark.parametrize("number", [0, 999_999])
def test_elements_have_the_size_that_the_figures_name(number: int) -> None:
    data = element_data(number)
    assert len(data) == ELEMENT_DATA_BYTES == 200
    assert canonicalize(data) == data
    assert len(b'{"ts":%d,"data":%b}' % (NOW_MS, data)) == ELEMENT_BYTES == 228
    assert len(append_body(data)) == 209


@pytest.mark.parametrize(
    "name", ["append", "append-1000", "signed-append", "fill-log", "fill-full", "fill-singly"]
)
def test_every_append_brings_an_element_of_its_own(name: str) -> None:
    numbers = []
    for request in WORKLOADS[name].requests(Author(BASE), 30):
        method, _, headers, body = parts(request)
        assert (method, headers["Content-Length"]) == ("POST", str(len(body)))
        data = orjson.loads(body)["data"]
        assert orjson.dumps(data) == element_data(data["n"])
        numbers.append(data["n"])
    assert numbers == list(range(30))


@pytest.mark.parametrize("name", ["append", "signed-append"])
def test_a_run_appends_to_one_log_that_no_other_run_has(name: str) -> None:
    paths = [{parts(request)[1] for request in WORKLOADS[name].requests(Author(BASE), 20)} for _ in range(2)]
    assert [len(each) for each in paths] == [1, 1]
    assert paths[0] != paths[1]


def test_a_thousand_logs_are_begun_and_then_appended_to_in_turn() -> None:
    author = Author(BASE)
    workload = WORKLOADS["append-1000"]
    begun = [parts(request)[1] for request in workload.prepare(author)]
    assert len(set(begun)) == LOGS == 1_000
    assert [parts(request)[1] for request in workload.requests(author, 2 * LOGS)] == begun * 2


def test_the_author_proof_of_a_signed_append_holds() -> None:
    author = Author(BASE)
    for request in WORKLOADS["signed-append"].requests(author, 20):
        _, path, _, body = parts(request)
        element = orjson.loads(body)
        key, data = path.removeprefix("/push/"), element_data(element["data"]["n"])
        proof = element["authorPubkey"], element["authorSignature"]
        assert key.startswith(f"signed-logs/{author.identity}/")
        assert verify_author(signing.APPEND_AUTHOR, key, data, *proof)


@pytest.fixture(scope="module")
def filled() -> Iterator[tuple[servers.Running, Path]]:
    """A server with a log of 500 elements at `long` and of 300 at `full`."""
    with servers.fresh_folder() as folder, servers.serving(folder) as server:
        assert run(server, "fill-log", 500).answers == 500
        assert run(server, "fill-full", 300).answers == 300
        yield server, folder


@pytest.mark.process
@pytest.mark.parametrize("name", ["append", "append-1000", "signed-append", "log-last", "log-checkpoint"])
def test_workloads_of_logs_are_answered_in_full(filled: tuple[servers.Running, Path], name: str) -> None:
    found = run(filled[0], name, 40)
    assert (found.answers, found.errors) == (40, {})


@pytest.mark.process
@pytest.mark.parametrize("name", ["log-last", "log-checkpoint"])
def test_tails_are_the_newest_elements(filled: tuple[servers.Running, Path], name: str) -> None:
    author = Author(filled[0].url)
    newest = author.times("/pull/logs/long?full=true")[-TAIL:]
    (request,) = WORKLOADS[name].requests(author, 1)
    assert author.times(parts(request)[1]) == newest


@pytest.mark.process
def test_a_tail_that_lacks_an_element_is_too_short(filled: tuple[servers.Running, Path]) -> None:
    def one_less(author: Author, count: int) -> list[bytes]:
        return [author.request(f"/pull/logs/long?last={TAIL - 1}")] * count

    short = dataclasses.replace(WORKLOADS["log-last"], requests=one_less)
    found = asyncio.run(measure(filled[0].url, short, count=5, seconds=30))
    assert found.errors == {"too short": 5}


def test_all_of_a_log_is_read_and_what_is_missing_noticed(filled: tuple[servers.Running, Path]) -> None:
    server, _ = filled
    answer_bytes = append_log.check_full(server.url, "full", 300)
    assert answer_bytes > 300 * ELEMENT_BYTES
    reading = append_log.read_full(server, "full", answer_bytes, times=2)
    assert (reading.answer_bytes, len(reading.seconds)) == (answer_bytes, 2)
    assert 0 <= reading.first_grown_mb <= reading.grown_mb
    with pytest.raises(RuntimeError, match="does not hold what was appended"):
        append_log.check_full(server.url, "full", 301)


def test_appends_to_short_and_long_logs_take_turns(filled: tuple[servers.Running, Path]) -> None:
    server, folder = filled
    author = Author(server.url)
    before = len(author.times("/pull/logs/long?full=true"))
    with closing(append_log.Appends(server, folder)) as appends:
        found = appends.round(pairs=2 * append_log.SHORT_GROWS)
    assert len(found.short) == len(found.long) == 2 * append_log.SHORT_GROWS
    assert len(author.times("/pull/logs/long?full=true")) == before + 2 * append_log.SHORT_GROWS
    for cost in found.short + found.long:
        assert cost.ms > 0
        assert cost.cpu_us > 0
        assert cost.wal_bytes >= ELEMENT_BYTES
        assert cost.written_bytes >= ELEMENT_BYTES


def test_the_write_ahead_log_is_counted_through_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    create_database(path, Schema(("CREATE TABLE body(text BLOB)",)))
    with closing(connect_writer(path, "FULL")) as connection:
        connection.execute("INSERT INTO body VALUES(zeroblob(10000))")
        wal = append_log.WriteAheadLog(path)
        log = path.with_name("some.db-wal")
        before = log.stat().st_size
        connection.execute("INSERT INTO body VALUES(zeroblob(10000))")
        grown = wal.grown_bytes()
        assert grown == log.stat().st_size - before > 10_000
        assert wal.grown_bytes() == 0
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("INSERT INTO body VALUES(zeroblob(10000))")
        assert log.stat().st_size == before + grown, "the log begins anew in the same file"
        assert wal.grown_bytes() > 10_000


def test_what_a_process_writes_to_disk_is_counted(tmp_path: Path) -> None:
    own = servers.Running("", os.getpid(), 0.0)
    before = own.written_bytes()
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(100_000))
        file.flush()
        os.fsync(file.fileno())
    assert own.written_bytes() - before >= 100_000


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The URL of a server that answers one request so, and closes the connection."""
    with create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_an_answer_that_is_cut_short_is_not_timed() -> None:
    with answering(b"x" * 99) as url, pytest.raises(RuntimeError, match="99 bytes of at least 100"):
        append_log.read_all(url, b"GET / HTTP/1.1\r\n\r\n", at_least=100)
    with answering(b"x" * 100) as url:
        assert append_log.read_all(url, b"GET / HTTP/1.1\r\n\r\n", at_least=100) > 0


def test_a_refused_append_is_not_timed() -> None:
    refused = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
    with (
        answering(refused) as url,
        closing(append_log.Caller(url)) as caller,
        pytest.raises(RuntimeError, match="503"),
    ):
        caller.call(Author(url).request("/push/logs/a", b"{}"))


def test_bytes_are_shown_as_means_and_times_as_medians() -> None:
    short = [append_log.Cost(1.0, 50.0, 100, 400)] * 3
    long = [
        append_log.Cost(1.1, 50.0, 100, 400),
        append_log.Cost(1.2, 60.0, 100, 400),
        append_log.Cost(9.0, 100.0, 400, 1_000),
    ]
    table = append_log.append_table([append_log.Round(short, long)], 1_000_000)
    assert "| p50, ms | 1.000 | 1.200 | 1.20 (1.20 to 1.20) | at most 1.3 |" in table
    assert "| server's CPU, µs | 50 | 70 | 1.40 (1.40 to 1.40) |  |" in table
    assert "| into the write-ahead log, bytes | 100 | 200 | 2.00 (2.00 to 2.00) | at most 1.3 |" in table
    assert "| written as the kernel counts, bytes | 400 | 600 | 1.50 (1.50 to 1.50) | at most 1.3 |" in table


def test_a_log_appended_by_many_and_one_appended_singly_are_beside_each_other() -> None:
    many = append_log.Reading(20_000_000, [0.1, 0.2, 0.1], 10.0, 20.0)
    singly = append_log.Reading(20_000_000, [0.2, 0.2, 0.4], 5.0, 50.0)
    table = append_log.full_table(many, singly, elements=90_000)
    assert "| all of 90,000 elements, 3 times | appended by 256 connections | by one | goal |" in table
    assert "| MB/s | 200 (100 to 200) | 100 (50 to 100) | 200 |" in table
    assert (
        "| the same over all times | 20.0 MB, 1.00 of the answer | 50.0 MB, 2.50 of the answer"
        " | below 2 of the answer |" in table
    )
