"""The bench of workers: every answer is counted, and none that is wrong."""

import asyncio
from itertools import repeat
from pathlib import Path

import pytest

from benches import servers, workers
from benches.workers import Measured
from benches.workloads import WORKLOADS, Author

SECONDS = 0.2


@pytest.mark.process
@pytest.mark.parametrize("count", [1, 2])
def test_every_workload_is_answered_by_every_worker(count: int, tmp_path: Path) -> None:
    with servers.serving(tmp_path / "data", workers=count) as server:
        assert len(workers.workers_of(server.pid)) == (0 if count == 1 else count)
        for name in workers.GOALS:
            run = workers.measure(server, name, 8, SECONDS)
            assert run.per_second > 0
            assert 0 < run.generator < 1
            assert run.server_cpu_us > 0


def test_two_workers_are_shown_beside_one() -> None:
    one, two = Measured(1_000.0, 50.0, 10.0, 1.2), Measured(1_800.0, 55.0, 10.0, 1.9)
    shown = workers.table({"push": {1: [one], 2: [two]}})
    assert "| push | 1 | 1,000 |  |" in shown
    assert "| push | 2 | 1,800 | 1.80 (1.80 to 1.80) |" in shown


@pytest.mark.process
def test_refusals_are_no_answers(tmp_path: Path) -> None:
    with servers.serving(tmp_path / "data") as server:
        author = Author(server.url)
        (signed,) = WORKLOADS["signed-pull"].requests(author, 1)
        with pytest.raises(RuntimeError, match=r"refused: .*401"):
            workers.load(server.url, repeat(signed), 2, SECONDS)
        with pytest.raises(RuntimeError, match="make more"):
            workers.load(server.url, [author.request("/health")] * 5, 2, 60)


def test_a_connection_that_breaks_ends_the_run(unused_tcp_port: int) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", unused_tcp_port):
            url = f"http://127.0.0.1:{unused_tcp_port}"
            await asyncio.to_thread(workers.load, url, [Author(url).request("/")] * 9, 1, SECONDS)

    with pytest.raises(ConnectionError):
        asyncio.run(run())
