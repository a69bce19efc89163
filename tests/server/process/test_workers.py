"""Several workers under one parent: real processes, killed and stopped."""

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from support.clients import SUBJECT, Browser, Reply, Signed, root_device
from support.depth import depth
from support.worker_processes import (
    WORKERS,
    Service,
    gone,
    on_fresh_connection,
    replies_of_all_workers,
    runs,
    until,
    workers,
)

pytestmark = pytest.mark.process

UNFINISHED = (
    b"POST /push/notes/late HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    b"Content-Length: 30\r\nExpect: 100-continue\r\n\r\n"
)
REST = b'{"data":{"n":1},"baseHash":""}'


async def health(browser: Browser) -> Reply:
    return await browser.request("GET", "/health")


async def test_every_worker_answers_and_logs_its_identity(tmp_path: Path) -> None:
    async with workers(tmp_path) as service:
        assert {reply.status for reply in await replies_of_all_workers(service.base, health)} == {200}
        assert all(map(runs, service.pids().values()))
        assert set(service.pids()) == {1, 2, 3, 4}
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        *stopped, last = [entry for entry in service.entries() if entry["message"] == "stopped"]
        assert {entry["worker"] for entry in stopped} == {1, 2, 3, 4}
        assert "worker" not in last


async def test_a_replay_is_rejected_by_every_worker(tmp_path: Path) -> None:
    async with workers(tmp_path) as service, aiohttp.ClientSession() as session:
        signer = Signed(service.base, session, SUBJECT, root_device(SUBJECT))
        key = f"u/{SUBJECT.user_id}/a"

        async def pull(browser: Browser) -> Reply:
            return await browser.pull(key, headers)

        for _ in range(5):
            headers = signer.headers("GET", f"/pull/{key}", b"")
            at_once = await asyncio.gather(*(on_fresh_connection(service.base, pull) for _ in range(16)))
            assert sorted(reply.status for reply in at_once) == [200] + [401] * 15
            assert {reply.status for reply in await replies_of_all_workers(service.base, pull)} == {401}


async def test_no_append_is_lost_or_doubled_and_no_replay_accepted(tmp_path: Path) -> None:
    """Signed appends by 8 connections to shared logs, each of them replayed on a fresh connection."""
    count = depth(24, 62)
    keys = [f"logs/{SUBJECT.user_id}/{name}" for name in ("a", "b", "c")]
    acknowledged: dict[str, list[tuple[int, int]]] = {key: [] for key in keys}
    replays: list[int] = []

    async def client(number: int, base: str) -> None:
        async with aiohttp.ClientSession() as session:
            browser = Browser(base, session)
            signer = Signed(base, session, SUBJECT, root_device(SUBJECT))
            for n in range(count):
                key = keys[n % len(keys)]
                body = json.dumps({"data": {"client": number, "n": n}}).encode()
                headers = signer.headers("POST", f"/push/{key}", body)
                headers["Content-Type"] = "application/json"

                async def append(
                    through: Browser, key: str = key, body: bytes = body, headers: dict[str, str] = headers
                ) -> Reply:
                    return await through.request("POST", f"/push/{key}", body, headers)

                reply = await append(browser)
                assert reply.status == 200, reply.body
                acknowledged[key].append((number, n))
                replays.append((await on_fresh_connection(base, append)).status)

    async with workers(tmp_path) as service, aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(number, service.base) for number in range(8)))
        assert replays == [401] * 8 * count
        reader = Signed(service.base, session, SUBJECT, root_device(SUBJECT))
        for key, sent in acknowledged.items():
            elements = (await reader.pull(f"{key}?full=true")).json["data"]["items"]
            held = [(element["data"]["client"], element["data"]["n"]) for element in elements]
            assert sorted(held) == sorted(sent)
            times = [element["ts"] for element in elements]
            assert times == sorted(set(times))


async def test_no_two_writes_have_one_etag(tmp_path: Path) -> None:
    """What forked processes draw from one source of names would be the same in all of them."""
    async with workers(tmp_path) as service:
        for n in range(10):

            async def push(browser: Browser, n: int = n) -> Reply:
                return await browser.push(f"notes/{n}-{os.urandom(4).hex()}", {"n": n})

            await replies_of_all_workers(service.base, push)
    with closing(sqlite3.connect(tmp_path / "data" / "pysync.db")) as database:
        ((writes, etags),) = database.execute("SELECT count(*), count(DISTINCT etag) FROM object").fetchall()
    assert writes == etags >= 40


async def test_acknowledged_writes_outlive_a_worker_and_others_replace_it(tmp_path: Path) -> None:
    key = f"logs/{SUBJECT.user_id}/a"
    pushed: dict[str, str] = {}
    appended: set[tuple[int, int]] = set()
    unknown: set[tuple[int, int]] = set()
    most = depth(300, 900)
    enough = [asyncio.Event() for _ in range(3)]

    async def client(number: int, base: str) -> None:
        """Append and push in turn until there was enough; a connection that breaks is opened again."""
        async with aiohttp.ClientSession() as session:
            signer = Signed(base, session, SUBJECT, root_device(SUBJECT))
            for n in range(10_000):
                if len(pushed) > most:
                    return
                try:
                    answer = await signer.request(
                        "POST", f"/push/{key}", {"data": {"client": number, "n": n}}
                    )
                    assert answer.status == 200, answer.body
                    appended.add((number, n))
                except aiohttp.ClientError:
                    unknown.add((number, n))
                try:
                    answer = await signer.push(f"notes/{number}-{n}", {"n": n})
                    assert answer.status == 200, answer.body
                    pushed[f"notes/{number}-{n}"] = answer.json["hash"]
                except aiohttp.ClientError:
                    pass
                for event, share in zip(enough, (2, 4, 6), strict=True):
                    if len(pushed) >= most * share // 9:
                        event.set()

    async with workers(tmp_path) as service, aiohttp.ClientSession() as session:
        clients = asyncio.gather(*(client(number, service.base) for number in range(16)))
        for number, event in enumerate(enough, start=1):
            await event.wait()
            await service.kill(number)
        await clients
        await replies_of_all_workers(service.base, health)
        reader = Signed(service.base, session, SUBJECT, root_device(SUBJECT))
        elements = (await reader.pull(f"{key}?full=true")).json["data"]["items"]
        held = [(element["data"]["client"], element["data"]["n"]) for element in elements]
        assert len(held) == len(set(held))
        assert appended <= set(held) <= appended | unknown
        assert len(unknown) <= 3 * 16
        for name, hash_ in pushed.items():
            assert (await reader.pull(name)).json["hash"] == hash_
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0


async def test_a_worker_that_dies_again_and_again_is_replaced(tmp_path: Path) -> None:
    async with workers(tmp_path, server={"workers": 2}) as service:
        for _ in range(3):
            await service.kill(2)
        messages = [entry["message"] for entry in service.entries() if entry["level"] == "error"]
        assert messages == [
            "worker 2 was ended by SIGKILL; another starts",
            "worker 2 was ended by SIGKILL; another starts",
            "worker 2 was ended by SIGKILL; another starts",
        ]
        # Another number's worker has a first time of its own; one that is ended politely is replaced as well.
        polite = service.pids()[1]
        os.kill(polite, signal.SIGTERM)
        await until(lambda: service.pids()[1] != polite)
        assert "worker 1 ended with status 0; another starts" in [e["message"] for e in service.entries()]
        await replies_of_all_workers(service.base, health, 2)


async def unfinished(service: Service) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection with a request under way, whose body is `REST`."""
    host, _, port = service.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(UNFINISHED)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    return reader, writer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [False, True], ids=["to-the-parent", "to-everybody"])
async def test_requests_under_way_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, to_all: bool
) -> None:
    """A terminal, and systemd by default, send a signal to all processes of a service."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    async with workers(tmp_path, server={"drainTimeoutMs": 3_600_000}) as service:
        open_requests = [await unfinished(service) for _ in range(8)]
        pids = list(service.pids().values())
        for pid in [service.process.pid, *(pids if to_all else [])]:
            os.kill(pid, number)
        await until(lambda: sum(e["message"] == "draining" for e in service.entries()) == WORKERS)
        for reader, writer in open_requests:
            writer.write(REST.replace(b"1", b"2"))
            assert (await reader.readuntil(b"\r\n")).split()[1] in (b"200", b"409")
            writer.close()
        assert await service.ended() == 0
        await gone(pids)
        assert not list(temporary.iterdir())


async def test_a_hangup_of_all_processes_reloads_once_and_ends_nobody(tmp_path: Path) -> None:
    async with workers(tmp_path) as service:
        pids = service.pids()
        for pid in (*pids.values(), service.process.pid):
            os.kill(pid, signal.SIGHUP)
        await until(lambda: any("reload" in entry["message"] for entry in service.entries()))
        assert {reply.status for reply in await replies_of_all_workers(service.base, health)} == {200}
        assert all(map(runs, pids.values()))
        service.signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert service.pids() == pids
        (said,) = [entry["message"] for entry in service.entries() if "reload" in entry["message"]]
        assert said == "reloaded the configuration; changed: nothing"


async def test_a_second_signal_ends_all_workers_at_once(tmp_path: Path) -> None:
    async with workers(tmp_path, server={"drainTimeoutMs": 3_600_000}) as service:
        _, writer = await unfinished(service)
        pids = list(service.pids().values())
        service.signal(signal.SIGTERM)
        await until(lambda: sum(e["message"] == "draining" for e in service.entries()) == WORKERS)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 1
        await gone(pids)
        writer.close()


async def test_a_worker_that_does_not_drain_is_ended(tmp_path: Path) -> None:
    async with workers(tmp_path, server={"workers": 2, "drainTimeoutMs": 1}) as service:
        pids = list(service.pids().values())
        os.kill(pids[0], signal.SIGSTOP)
        service.signal(signal.SIGTERM)
        assert await service.ended() == 1
        await gone(pids)


async def test_workers_end_in_order_when_their_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    async with workers(tmp_path) as service:
        reader, writer = await unfinished(service)
        pids = list(service.pids().values())
        service.signal(signal.SIGKILL)
        await until(lambda: sum("parent is gone" in e["message"] for e in service.entries()) == WORKERS)
        writer.write(REST)
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"200"
        writer.close()
        await gone(pids)
        assert not list(temporary.iterdir())


def rejected(folder: Path, *flags: str) -> tuple[int, str]:
    """Exit status and standard error of a server that does not start."""
    command = [sys.executable, "-m", "pysync", "serve", "--store", f"file:{folder}", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ran.stdout == ""
    return ran.returncode, ran.stderr


async def test_an_address_is_not_shared_with_another_service(tmp_path: Path) -> None:
    async with workers(tmp_path) as service:
        port = service.base.rpartition(":")[2]
        said = f"pysync: {service.base}: the address is in use; choose another port with --port\n"
        for others in ("1", "2"):
            messages = await asyncio.to_thread(rejected, tmp_path, "--port", port, "--workers", others)
            assert messages == (1, said)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", int(port)))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        messages = await asyncio.to_thread(rejected, tmp_path, "--port", str(port), "--workers", "2")
        assert messages[0] == 1
        assert "the address is in use" in messages[1]


async def test_a_service_follows_another_at_its_address_at_once(tmp_path: Path) -> None:
    port = 0
    for _ in range(2):
        async with workers(tmp_path, port) as service, aiohttp.ClientSession() as session:
            assert (await health(Browser(service.base, session))).status == 200
            port = int(service.base.rpartition(":")[2])
            service.signal(signal.SIGTERM)  # it closes our connection, which then lingers on its side
            assert await service.ended() == 0


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1"])
async def test_workers_listen_wherever_one_process_would(tmp_path: Path, host: str) -> None:
    async with workers(tmp_path, server={"host": host, "workers": 2}) as service:
        await replies_of_all_workers(service.base, health, 2)


def test_worker_start_failure_is_reported_once_as_by_a_single_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    alone, several = (rejected(tmp_path / "file", "--port", "0", "--workers", count) for count in ("1", "4"))
    assert alone == several
    assert several[0] != 0
    assert several[1].count("cannot open the store") == 1


async def metrics(browser: Browser) -> Reply:
    return await browser.request("GET", "/metrics")


def healths(page: Reply) -> int:
    """How often `/health` was answered, as a worker tells it."""
    found = re.search(rb'requests_total\{action="health".*\} (\d+)', page.body)
    return int(found[1]) if found else 0


async def test_every_worker_reports_the_metrics_of_all_and_no_count_goes_back(tmp_path: Path) -> None:
    async with workers(tmp_path) as service:
        messages = 0
        for number in (1, 2, 3):
            sent = len(await replies_of_all_workers(service.base, health))
            # Once each has told, all have written what they counted.
            pages = await replies_of_all_workers(service.base, metrics)
            pages.append(await on_fresh_connection(service.base, metrics))
            counts = [healths(page) for page in pages]
            assert messages <= counts[0]
            assert counts == sorted(counts)
            assert counts[-1] == messages + sent
            await service.kill(number)
            messages = counts[-1]
        after = [healths(page) for page in await replies_of_all_workers(service.base, metrics)]
        assert set(after) == {messages}


IMPATIENT = """
import sys
from pysync.cli.main import main
from pysync.server.process.supervisor import Supervisor
Supervisor.__init__.__kwdefaults__["stall_s"] = 3.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
async def test_a_worker_that_is_stopped_is_replaced_and_counted(tmp_path: Path) -> None:
    async def metrics(browser: Browser) -> Reply:
        return await browser.request("GET", "/metrics")

    async with workers(tmp_path, program=("-c", IMPATIENT), server={"workers": 2}) as service:
        stopped = service.pids()[1]
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: service.pids()[1] != stopped)
        assert not runs(stopped)
        assert any("worker 1 has not answered" in entry["message"] for entry in service.entries())
        replies = await replies_of_all_workers(service.base, metrics, 2)
        assert all(b'replacements_total{reason="stalled"}' in reply.body for reply in replies)
