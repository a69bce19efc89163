"""`pysync watch` as scripts meet it."""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from typing import Any

import pytest
from support.cli_runner import Shell, running
from support.clients import Start
from support.collections import OWN, collection
from support.fake_sse_server import End, event, rejected, streamed, streaming

from pysync.client import Client

SERVICE: dict[str, Any] = {
    "collections": [
        collection("notes"),
        collection("tasks"),
        collection("mine", "u/{identity}/{id}", **OWN),
    ],
    "namespaces": {"acme": {"collections": [collection("notes")]}},
}


async def line(process: Process) -> Any:
    assert process.stdout is not None
    return json.loads(await process.stdout.readline())


@pytest.mark.process
async def test_changes_are_printed_until_it_is_interrupted_and_again_after_any_of_them(start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base) as anyone, anyone.watch() as changes:
        cursor = changes.last_event_id
        assert cursor is not None
        pushed = await anyone.push("notes/e", {})
        await anyone.push("tasks/a", {})
        await anyone.push("notes/b", {})
        async with running("watch", "--after", cursor, "--server", base) as process:
            first = await line(process)
            assert first == {
                "collection": "notes",
                "params": {"id": "e"},
                "hash": pushed.hash,
                "timestamp": pushed.timestamp_ms,
                "id": first["id"],
            }
            assert (await line(process))["collection"] == "tasks"
            process.send_signal(signal.SIGINT)
            await process.wait()
            assert process.returncode == 130
        narrow = ("--collections", "notes,tasks", "--params", '{"notes": {"id": "b"}}')
        async with running("watch", *narrow, "--after", first["id"], "--server", base) as process:
            assert (await line(process))["params"] == {"id": "a"}
            assert (await line(process))["params"] == {"id": "b"}


@pytest.mark.process
async def test_a_namespace_is_watched_and_its_changes_say_so(start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base, namespace="acme") as inside, inside.watch() as changes:
        await inside.push("notes/a", {})
        options = ("--after", str(changes.last_event_id), "--namespace", "acme", "--server", base)
        async with running("watch", *options) as process:
            assert (await line(process))["namespace"] == "acme"


@pytest.mark.process
async def test_resets_are_printed_and_an_outage_is_reported_once() -> None:
    scripts = [
        streamed(event("1")),
        *[rejected(503, "unavailable")] * 2,
        streamed('id: 8\nevent: reset\ndata: {"reset":true}\n\n' + event("9"), End.HOLD),
    ]
    async with streaming(*scripts) as server, running("watch", "--server", server.url) as process:
        found = [await line(process) for _ in range(3)]
        assert found[1] == {"reset": True, "id": "8"}
        assert [change["id"] for change in found] == ["1", "8", "9"]
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert errors == b"pysync: the stream of changes ended; reconnecting\n"


@pytest.mark.process
async def test_watch_ends_when_its_output_is_closed_even_without_news() -> None:
    script = streamed(event("1"), End.HOLD)
    reads, writes = os.pipe()
    async with (
        streaming(script) as server,
        running("watch", "--server", server.url, stdout=writes) as process,
    ):
        os.close(writes)
        assert await asyncio.to_thread(os.read, reads, 1000)
        os.close(reads)
        assert await process.wait() == 0
        assert process.stderr is not None
        assert await process.stderr.read() == b""
        await script.closed.wait()


@pytest.mark.slow
async def test_failed_watch_is_reported_with_its_status(
    shell: Shell, start: Start, unused_tcp_port: int
) -> None:
    server = ("--server", await start(SERVICE))
    for arguments, status in (
        (("--params", "[]"), 1),
        (("--collections", "none"), 1),
        (("--collections", "mine"), 4),
        (("--collections", "notes", "--params", '{"notes": {"x": "y"}}'), 1),
        (("--server", f"http://127.0.0.1:{unused_tcp_port}"), 5),
    ):
        found, output, errors = await shell.run_async("watch", *server, *arguments)
        assert (found, output, errors.count("\n")) == (status, "", 1), arguments
