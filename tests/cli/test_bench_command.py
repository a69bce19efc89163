"""`pysync bench`: loads any service with a manifest, in the collections that it is told."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.cli_runner import Shell, running
from support.clients import STRANGER, Browser, Start
from support.collections import OWN, UNSIGNED, collection

from pysync.store.memory import MemoryStore

COLLECTIONS: list[dict[str, Any]] = [
    collection("notes", listable=True),
    collection("own", "users/{identity}/{kind}/{id}", **OWN),
    collection("log", appendOnly=UNSIGNED),
    collection("proven", appendOnly=True),
    collection("files", allowedMimeTypes=["image/*"]),
    collection("inbox", pushOnly=True),
    collection("news", "news/today", pullOnly=True),
    collection("small", maxBodyBytes=100),
    collection("staff", readRoles=["admin"], writeRoles=["admin"]),
    collection("slow", rateLimit={"push": {"windowMs": 3_600_000, "maxRequests": 5}}),
]
SERVICE: dict[str, Any] = {
    "auth": {"adminToken": "token-of-the-tests"},
    "configEndpoint": {"auth": "public"},
    "collections": COLLECTIONS,
    "namespaces": {"acme": {"collections": [{**COLLECTIONS[0], "storagePath": "acme/{id}"}]}},
}
FEW = ("--count", "20", "--seconds", "30", "--connections", "4", "--bytes", "300")


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "key.json"
    path.write_bytes(STRANGER.to_json())
    return str(path)


async def benched(shell: Shell, base: str, *arguments: str) -> list[tuple[str, int, dict[str, int]]]:
    """Workload, answers and errors of each run."""
    status, printed, errors = await shell.run_async("bench", "--server", base, *FEW, "--json", *arguments)
    assert errors == ""
    runs = [json.loads(line) for line in printed.splitlines()]
    assert status == int(any(run["errors"] for run in runs))
    return [(run["workload"], run["answers"], run["errors"]) for run in runs]


@pytest.mark.parametrize(
    ("argument", "workloads"),
    [
        ("notes", ["notes push", "notes pull"]),
        ("log", ["log append", "log tail"]),
        ("files", ["files push", "files pull"]),
        ("inbox", ["inbox push"]),
        ("news=news/today", ["news pull"]),
    ],
)
async def test_each_collection_is_used_as_its_manifest_says(
    start: Start, shell: Shell, argument: str, workloads: list[str]
) -> None:
    assert await benched(shell, await start(SERVICE), argument) == [(name, 20, {}) for name in workloads]


async def test_several_collections_actions_and_a_namespace(
    start: Start, session: aiohttp.ClientSession, shell: Shell
) -> None:
    base = await start(SERVICE)
    runs = await benched(shell, base, "notes", "log", "--action", "push")
    assert [name for name, _, _ in runs] == ["notes push", "log append"]
    stored = (await Browser(base, session).request("GET", "/list/notes")).json
    assert len(stored["items"]) == 20
    assert await benched(shell, base, "notes=acme/{id}", "--namespace", "acme", "--action", "push") == [
        ("notes push", 20, {})
    ]


async def test_requests_are_signed_where_there_is_a_key(start: Start, shell: Shell, key: str) -> None:
    base = await start(SERVICE)
    own = "own=users/{identity}/{kind}/{id}"
    assert await benched(shell, base, own, "proven", "--key", key) == [
        ("own push", 20, {}),
        ("own pull", 20, {}),
        ("proven append", 20, {}),
        ("proven tail", 20, {}),
    ]
    assert await benched(shell, base, "staff", "--admin-token", "token-of-the-tests") == [
        ("staff push", 20, {}),
        ("staff pull", 20, {}),
    ]


async def test_answers_that_are_rejected_are_counted(start: Start, shell: Shell, key: str) -> None:
    base = await start(SERVICE)
    assert await benched(shell, base, "slow", "--key", key, "--action", "push") == [
        ("slow push", 5, {"429": 15})
    ]
    status, printed, _ = await shell.run_async("bench", "--server", base, *FEW, "notes", "--action", "push")
    assert status == 0
    head, row = printed.splitlines()
    assert head.split()[:2] == ["workload", "per"]
    assert row.startswith("notes push ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "the server has no collection nowhere; it has: notes, own, log,"),
        (("own=users/{identity}/x/{id}",), "{identity} stands for the user id of a key: pass --key"),
        (("proven",), "appends to proven need an author proof: pass --key"),
        (("small",), "small accepts at most 100 bytes per body; pass a smaller --bytes"),
        (("news",), "news cannot be pushed to: name an existing document, as news=KEY"),
        (("inbox", "--action", "pull"), "nothing to do: inbox is not pulled"),
        (("notes=notes/x/{id",), "is not a key template"),
        (("slow", "--action", "pull"), "slow pull cannot be prepared: {'429': 15}"),
    ],
)
async def test_a_failed_preparation_is_reported(
    start: Start, shell: Shell, arguments: tuple[str, ...], message: str
) -> None:
    status, _, errors = await shell.run_async("bench", "--server", await start(SERVICE), *FEW, *arguments)
    assert status == 1
    assert message in errors


@pytest.mark.parametrize("action", ["push", "pull"])
async def test_it_ends_at_the_first_request_that_lacks_the_right_key(
    start: Start, session: aiohttp.ClientSession, shell: Shell, key: str, action: str
) -> None:
    base = await start(SERVICE)
    bench = ("bench", "staff", "--server", base, *FEW, "--json", "--action", action)
    own = STRANGER.user_id
    for credentials, said in (
        ((), "401: the requests have no credentials; add --key FILE"),
        (("--admin-token", "x" * 20), "401: the server does not accept the admin token; give another one"),
        (("--key", key), f"403: the key of the user {own} may not use staff; give another one"),
    ):
        assert await shell.run_async(*bench, *credentials) == (4, "", f"pysync: staff {action}: {said}\n")
    async with session.get(f"{base}/metrics") as response:
        counts = re.findall(r'requests_total\{.*status="40[13]".*\} (\d+)', await response.text())
    assert 3 <= sum(map(int, counts)) <= 3 * 4, "one for each connection at most"


class Hanging(MemoryStore):
    """A store that takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def put(self, *arguments: Any, **options: Any) -> str:
        if "bench" in arguments[0]:
            self.requested.set()
            await self.goes_on.wait()
        return await super().put(*arguments, **options)


@pytest.mark.process
async def test_an_interrupted_run_ends_quietly(start: Start) -> None:
    store = Hanging()
    base = await start(SERVICE, store=store)
    async with running("bench", "notes", "--server", base, *FEW, "--json", "--action", "push") as process:
        await store.requested.wait()
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
    store.goes_on.set()
    assert (process.returncode, output, errors) == (130, b"", b"")


async def test_a_service_without_a_manifest_is_reported(start: Start, shell: Shell) -> None:
    base = await start({"collections": COLLECTIONS})
    status, _, errors = await shell.run_async("bench", "--server", base, *FEW, "notes")
    assert status == 1
    assert "the server has no manifest of its collections: set configEndpoint" in errors


@pytest.mark.process
def test_it_needs_nothing_of_a_checkout(tmp_path: Path) -> None:
    imports = "import sys; sys.modules['benches'] = None; from pysync.cli.main import main"
    script = f"{imports}; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", script, "bench", "notes", "--server", "http://127.0.0.1:1"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    said = "pysync: cannot connect to 127.0.0.1 port 1: the connection was refused"
    assert (ran.returncode, ran.stderr.partition(";")[0]) == (5, said)
