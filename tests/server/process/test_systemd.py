"""systemd learns when the service has started, and that it still works; without systemd nothing is sent."""

import array
import asyncio
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support.server_process import serving

from pysync.server.process import watchdog
from pysync.server.process.systemd import sd_notify
from pysync.server.process.watchdog import LoopWatchdog


class Notified:
    """The socket of systemd: a datagram for each report, with the process that sent it."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(address)

    def report(self) -> tuple[str, int]:
        """The next report, and the id of its process."""
        text, ancillary, _, _ = self._socket.recvmsg(1000, socket.CMSG_SPACE(struct.calcsize("3i")))
        pid, *_ = array.array("i", ancillary[0][2])
        return text.decode(), pid

    def waiting(self) -> list[str]:
        """The reports that wait, after which none does."""
        found = []
        self._socket.setblocking(False)
        try:
            while True:
                found.append(self.report()[0])
        except BlockingIOError:
            return found
        finally:
            self._socket.setblocking(True)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def notified(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Notified]:
    name = str(tmp_path / "notify")
    systemd = Notified(name if request.param == "path" else f"\0{name}")
    monkeypatch.setenv("NOTIFY_SOCKET", name if request.param == "path" else f"@{name}")
    yield systemd
    systemd.close()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_main_process_reports_that_it_listens_and_then_that_it_works(
    notified: Notified, tmp_path: Path, workers: int
) -> None:
    starting = serving(tmp_path, server={"workers": workers})
    async with starting as server, aiohttp.ClientSession() as session:
        text, pid = await asyncio.to_thread(notified.report)
        while text == "WATCHDOG=1":  # which systemd ignores until the service has started
            text, pid = await asyncio.to_thread(notified.report)
        assert (text, pid) == ("READY=1", server.process.pid)
        async with session.get(f"{server.base}/health") as answer:
            assert answer.status == 200
        for _ in range(2):
            report = await asyncio.to_thread(notified.report)
            assert report == ("WATCHDOG=1", server.process.pid)


class Logged(logging.Handler):
    """Is set once something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.is_set = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_set.set()


async def test_process_whose_event_loop_is_blocked_reports_nothing(notified: Notified) -> None:
    stalled = Logged()
    watchdog.log.addHandler(stalled)
    try:
        async with LoopWatchdog(stall_s=0.1):
            assert notified.waiting() == ["WATCHDOG=1"]
            assert stalled.is_set.wait()  # as a plugin that blocks, for ten rounds
            assert notified.waiting() == []
            while not notified.waiting():
                await asyncio.sleep(0)
    finally:
        watchdog.log.removeHandler(stalled)


@pytest.mark.parametrize("address", [None, "", "/nowhere/notify"])
def test_nothing_happens_without_systemd(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    before = os.listdir("/proc/self/fd")
    sd_notify("READY=1")
    assert os.listdir("/proc/self/fd") == before


def test_report_never_waits_for_systemd(notified: Notified) -> None:
    for _ in range(10_000):  # more than the queue of a socket takes
        sd_notify("WATCHDOG=1")
    assert set(notified.waiting()) == {"WATCHDOG=1"}
