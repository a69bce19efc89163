"""`pysync append` and `pysync tail` as scripts meet them."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from support.cli_runner import Shell, running
from support.clients import Start
from support.collections import UNSIGNED, collection
from support.fake_server import Answer, serving

from pysync._core import verify_author
from pysync.auth.signing import APPEND_AUTHOR
from pysync.cli import io as cli_io
from pysync.client import Client

SERVICE: dict[str, Any] = {
    "collections": [
        collection("log", appendOnly=UNSIGNED),
        collection("small", appendOnly={"requireAuthorSignature": False, "maxPullLimit": 5}),
        collection("note"),
        collection("diary", appendOnly={"field": "entries"}),
    ]
}


def lines(output: str | bytes) -> list[Any]:
    return [json.loads(line) for line in output.splitlines()]


async def test_tail_prints_appended_elements(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    status, output, _ = await shell.run_async("append", "log/a", '{"text": "é"}', *server)
    first = json.loads(output)
    assert (status, set(first)) == (0, {"hash", "timestamp"})
    assert (await shell.run_async("append", "log/a", *server, stdin='{"n":2}'))[0] == 0
    assert (await shell.run_async("append", "log/a", "-", *server, stdin='{"n":\n3}'))[0] == 0
    status, output, errors = await shell.run_async("tail", "log/a", *server)
    assert (status, errors) == (0, "")
    assert [printed["data"] for printed in lines(output)] == [{"text": "é"}, {"n": 2}, {"n": 3}]
    assert output.splitlines()[0] == f'{{"ts": {first["timestamp"]}, "data": {{"text": "é"}}}}'
    assert await shell.run_async("tail", "log/none", *server) == (0, "", "")


async def test_document_is_distinguished_from_a_log(shell: Shell, start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base) as anyone:
        await anyone.push("note/a", {"n": 1}, None)
    printed = "pysync: note/a is a document, not a log\n"
    assert await shell.run_async("append", "note/a", "{}", "--server", base) == (1, "", printed)
    printed = "pysync: what is stored is no log with its elements in 'items'\n"
    assert await shell.run_async("tail", "note/a", "--server", base) == (1, "", printed)


async def test_tail_has_the_requested_length(shell: Shell, start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base) as anyone:
        for ts_ms in range(1, 31):
            await anyone.append("log/a", {}, ts_ms=ts_ms)
            await anyone.append("small/a", {}, ts_ms=ts_ms)

    async def printed(*options: str, key: str = "log/a") -> list[int]:
        status, output, errors = await shell.run_async("tail", key, *options, "--server", base)
        assert (status, errors) == (0, "")
        return [printed["ts"] for printed in lines(output)]

    assert await printed() == [*range(21, 31)]
    assert await printed("-n", "3") == [28, 29, 30]
    assert await printed("-n", "0") == []
    assert await printed("--since", "5") == [*range(6, 31)]
    assert await printed("--since", "5", "-n", "2") == [29, 30]
    assert await printed("--since", "5", key="small/a") == [*range(6, 31)]


async def test_an_element_is_proved_by_the_key_and_may_have_a_time_of_its_own(
    shell: Shell, start: Start
) -> None:
    server = ("--server", await start(SERVICE))
    me = shell.json("keys", "new", "--out", "me.json")
    rejected = (
        1,
        "",
        "pysync: append requires authorPubkey and authorSignature: sign the element with --key FILE\n",
    )
    assert await shell.run_async("append", "diary/a", '{"n":1}', *server) == rejected
    status, output, _ = await shell.run_async(
        "append", "diary/a", '{"n":1}', "--ts", "7", "--key", "me.json", *server
    )
    assert (status, json.loads(output)["timestamp"]) == (0, 7)
    status, output, _ = await shell.run_async("tail", "diary/a", "--field", "entries", *server)
    (printed,) = lines(output)
    assert (status, printed["ts"], printed["authorPubkey"]) == (0, 7, me["edPub"])
    assert verify_author(APPEND_AUTHOR, "diary/a", b'{"n":1}', me["edPub"], printed["authorSignature"])
    status, _, errors = await shell.run_async(
        "append", "diary/a", "{}", "--ts", "7", "--key", "me.json", *server
    )
    printed = (
        "pysync: non_monotonic_timestamp: --ts must be greater than the timestamp of the log's last element\n"
    )
    assert (status, errors) == (1, printed)
    printed = "pysync: pull_bound_required: this is a log; read it with `pysync tail`\n"
    assert await shell.run_async("pull", "diary/a", *server) == (1, "", printed)
    status, output, errors = await shell.run_async("tail", "diary/a", *server)
    assert (status, output) == (1, "")
    assert "'items'" in errors


async def next_time(process: Process) -> int:
    assert process.stdout is not None
    return int(json.loads(await process.stdout.readline())["ts"])


def following(*arguments: str) -> AbstractAsyncContextManager[Process]:
    """`pysync tail -f` in a process of its own."""
    return running("tail", "-f", *arguments)


@pytest.mark.process
async def test_a_log_is_followed_until_it_is_interrupted(start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base) as anyone:
        for ts_ms in (1, 2, 3):
            await anyone.append("log/a", {}, ts_ms=ts_ms)
        async with following("log/a", "-n", "2", "--collection", "log", "--server", base) as process:
            assert [await next_time(process), await next_time(process)] == [2, 3]
            for ts_ms in (4, 9):
                await anyone.append("log/a", {}, ts_ms=ts_ms)
                assert await next_time(process) == ts_ms
            process.send_signal(signal.SIGINT)
            assert await process.communicate() == (b"", b"")
            assert process.returncode == 130


async def test_a_collection_that_does_not_exist_ends_following(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    status, output, errors = await shell.run_async("tail", "-f", "log/a", "--collection", "none", *server)
    assert (status, output, errors.count("\n")) == (1, "", 1)


@pytest.mark.process
async def test_following_ends_when_its_output_is_closed_even_without_news(start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base) as anyone:
        await anyone.append("log/a", {}, ts_ms=1)
        reads, writes = os.pipe()
        async with running("tail", "-f", "log/a", "--server", base, stdout=writes) as process:
            os.close(writes)
            assert json.loads(await asyncio.to_thread(os.read, reads, 1000))["ts"] == 1
            os.close(reads)
            assert await process.wait() == 0
            assert process.stderr is not None
            assert await process.stderr.read() == b""


@pytest.mark.process
async def test_restart_of_the_server_is_reported_once() -> None:
    def held(*times: int) -> Answer:
        items = [{"ts": ts_ms, "data": {}} for ts_ms in times]
        return 200, {"data": {"items": items}, "hash": "h", "timestamp": 1}

    busy: Answer = (503, {"error": "store_unavailable"})
    rejected: Answer = (403, {"error": "Forbidden"})
    answers = [held(1), *[busy] * 4, held(1, 2), rejected]
    async with serving(*answers) as server, following("log/a", "--server", server.url) as process:
        assert [await next_time(process), await next_time(process)] == [1, 2]
        _, errors = await process.communicate()
    assert process.returncode == 4
    assert errors == (
        b"pysync: store_unavailable: the server's store does not answer; its log has the cause"
        b"; reconnecting\n"
        b"pysync: Forbidden: the server's log has the reason if `server.logRefusals` is on\n"
    )


@pytest.mark.slow
async def test_a_server_that_is_not_there_at_first_ends_following(
    shell: Shell, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_io, "READER_CHECK_S", 0)  # the output is no file here, so nobody closes it
    url = f"http://127.0.0.1:{unused_tcp_port}"
    status, output, errors = await shell.run_async("tail", "-f", "log/a", "--server", url)
    said = f"pysync: cannot connect to 127.0.0.1 port {unused_tcp_port}: the connection was refused; "
    assert (status, output, errors.startswith(said)) == (5, "", True)
