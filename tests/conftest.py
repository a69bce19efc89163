"""Fixtures that all tests share: a service in this process, and callers who sign as real clients do."""

import asyncio
import inspect
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, is_hypothesis_test, settings
from support.append_log_nodes import MakeNode, Node
from support.cli_runner import Shell
from support.clients import (
    ISSUER,
    PROTOCOL,
    STRANGER,
    SUBJECT,
    Browser,
    Signed,
    Start,
    minted_at,
    root_device,
)
from support.configurations import patient
from support.depth import depth

from pysync import config
from pysync.auth import issuing
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.server.app import App, create_app
from pysync.server.process.serve import serve_on
from pysync.store import Store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

pytest_plugins = [
    "components.fixtures",
    "support.browser",
    "support.erasure",
    "support.places",
    "support.sse_client",
    "support.web_replicas",
]

# On a cold or busy machine examples are slow to make; each test has a time limit of its own.
settings.register_profile(
    "pysync", max_examples=depth(40, 400), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pysync")

COMPONENTS = {
    "radosgw",
    "moto",
    "redis_server",
    "start_redis",
    "redis",
    "start_nginx",
    "start_caddy",
    "chromium",
    "systemd_analyze",
    "promtool",
    "starfish_npm",
    "starfish_python",
    "typescript",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs somebody else's server, and what looks further when it is given more time."""
    for item in items:
        assert isinstance(item, pytest.Function)
        callspec = getattr(item, "callspec", None)
        chosen = (
            () if callspec is None else (each for each in callspec.params.values() if isinstance(each, str))
        )
        if not COMPONENTS.isdisjoint((*item.fixturenames, *chosen)):
            item.add_marker("component")
        grows = hasattr(item.module, "depth") and "depth(" in inspect.getsource(item.function)
        if grows or is_hypothesis_test(item.function):
            item.add_marker("long")


# Who is started in the background by a shell ignores it, and so would all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Starts services in this process: `await start(members, store=..., now_ms=...)` -> base URL."""
    async with AsyncExitStack() as stack:

        async def start_one(members: dict[str, Any], store: Store | None = None, **options: Any) -> str:
            parsed = config.parse({"version": 1, "store": "memory:", **patient(members)})
            app = await stack.enter_async_context(await create_app(parsed, store, **options))
            apps.append(app)
            return f"http://127.0.0.1:{await stack.enter_async_context(serve_on(app))}"

        apps: list[App] = []
        start_one.apps = apps  # type: ignore[attr-defined]
        yield start_one


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as opened:
        yield opened


@pytest.fixture(scope="session")
def base() -> Iterator[str]:
    """The service under test, which all tests of this process share: at TESTS_URL (started with
    tests/protocol.json), else one in a thread."""
    if "TESTS_URL" in os.environ:
        yield os.environ["TESTS_URL"]
        return
    parsed = config.parse({"version": 1, "store": "memory:", **patient(json.loads(PROTOCOL.read_text()))})
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def serve() -> str:
        app = await stack.enter_async_context(await create_app(parsed))
        return f"http://127.0.0.1:{await stack.enter_async_context(serve_on(app))}"

    yield asyncio.run_coroutine_threadsafe(serve(), loop).result()
    asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def anyone(base: str, session: aiohttp.ClientSession) -> Browser:
    return Browser(base, session)


@pytest.fixture
def owner(base: str, session: aiohttp.ClientSession) -> Signed:
    """The trusted issuer, on a root device that may do everything under its own roles."""
    names = ("rooms", "roots", "*")
    return Signed(base, session, ISSUER, root_device(ISSUER, collections=names))


@pytest.fixture
def member(base: str, session: aiohttp.ClientSession) -> Signed:
    """Somebody else, whom the issuer lets read and write `rooms`."""
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=issuing.writer_grant("rooms"), **minted_at()
    )
    return Signed(base, session, SUBJECT, certificate)


@pytest.fixture
def untrusted(base: str, session: aiohttp.ClientSession) -> Signed:
    """A root device of a key that nobody trusts."""
    return Signed(base, session, STRANGER, root_device(STRANGER, collections=("rooms", "*")))


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Keys that no other test, and no earlier run against a service that stays, has used."""
    suffix = os.urandom(6).hex()
    return lambda prefix: f"{prefix}/{suffix}"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name in ("PYSYNC_URL", "PYSYNC_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return Shell(capsys, monkeypatch)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Puts the log back as it was: `logs.configure` replaces whoever listens."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.getLogger("pysync").setLevel(logging.NOTSET)


@pytest.fixture
def now_ms() -> int:
    """When the test began."""
    return wall_clock_ms()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a store, which is not there yet."""
    return tmp_path / "data"


@pytest_asyncio.fixture(params=["memory", "local"])
async def store(request: pytest.FixtureRequest, folder: Path, clock: FakeClock) -> AsyncIterator[Store]:
    """An empty store, of each kind in turn, dated by `clock`."""
    local = request.param == "local"
    store: Store = await LocalStore.open_folder(folder, clock) if local else MemoryStore(clock)
    yield store
    await store.close()


@pytest_asyncio.fixture
async def make_node(store: Store, clock: FakeClock) -> AsyncIterator[MakeNode]:
    """Makes nodes over one store; at the end what they have under way is finished."""
    coordinator = MemoryCoordinator(clock)
    nodes: list[Node] = []

    def make(head_bytes: int | None = 700, ahead_ms: int = 0) -> Node:
        nodes.append(Node(store, coordinator, clock, head_bytes, ahead_ms))
        return nodes[-1]

    yield make
    for node in nodes:
        await node.logs.close()


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    return make_node()
