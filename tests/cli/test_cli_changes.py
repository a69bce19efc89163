"""`pysync changes` as scripts meet it."""

import json
from typing import Any

from support.cli_runner import Shell
from support.clients import Start
from support.collections import NOTES, collection

from pysync.client import Client

SERVICE: dict[str, Any] = {
    "collections": [{**NOTES, "deletable": True}, collection("tasks")],
    "namespaces": {"acme": {"collections": [collection("notes", "acme/{id}")]}},
}


async def lines(shell: Shell, *arguments: str) -> list[Any]:
    status, output, errors = await shell.run_async("changes", *arguments)
    assert (status, errors) == (0, "")
    return [json.loads(line) for line in output.splitlines()]


async def test_latest_changes_are_printed_and_last_a_cursor_to_go_on_from(start: Start, shell: Shell) -> None:
    base = await start(SERVICE)
    async with Client(base) as anyone:
        first = await anyone.push("notes/a", {})
        await anyone.push("tasks/b", {})
        change, last = await lines(shell, "--collections", "notes", "--server", base)
        assert change == {
            "collection": "notes",
            "params": {"id": "a"},
            "hash": first.hash,
            "timestamp": first.timestamp_ms,
        }
        assert last.keys() == {"cursor"}
        assert len(await lines(shell, "--server", base)) == 3
        removed = await anyone.delete("notes/a", first.hash)
        after = await lines(shell, "--since", last["cursor"], "--server", base)
        assert after[:-1] == [{**change, "hash": "", "timestamp": removed.timestamp_ms, "removed": True}]
        assert await lines(shell, "--since", after[-1]["cursor"], "--server", base) == after[-1:]
        assert await lines(shell, "--since", "now", "--server", base) == after[-1:]
        narrow = ("--params", '{"tasks": {"id": "b"}}', "--collections", "tasks")
        assert len(await lines(shell, *narrow, "--server", base)) == 2


async def test_changes_of_a_namespace_say_so(start: Start, shell: Shell) -> None:
    base = await start(SERVICE)
    async with Client(base, namespace="acme") as inside:
        await inside.push("acme/a", {})
    change, _ = await lines(shell, "--namespace", "acme", "--server", base)
    assert change["namespace"] == "acme"


async def test_cursor_of_another_server_prints_a_reset(start: Start, shell: Shell) -> None:
    (last,) = await lines(shell, "--server", await start(SERVICE))
    (reset,) = await lines(shell, "--since", last["cursor"], "--server", await start(SERVICE))
    assert (reset.keys(), reset["reset"]) == ({"reset", "cursor"}, True)


async def test_malformed_cursor_is_reported(start: Start, shell: Shell) -> None:
    status, _, errors = await shell.run_async("changes", "--since", "x", "--server", await start(SERVICE))
    assert (status, errors) == (1, "pysync: Invalid since parameter\n")
