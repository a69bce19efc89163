"""What the tests of the service share: a service in process, and callers who sign as real clients do."""

import base64
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from log_nodes import Node
from shell import Shell
from yarl import URL

from pysync import config
from pysync.auth import issuing, signing
from pysync.auth.certificates import Certificate
from pysync.auth.signing import IdentityKeys
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.server.app import App, create_app
from pysync.server.serve import serve_on
from pysync.store import Store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

pytest_plugins = ["components.fixtures", "streams"]

# On a cold or busy machine examples are slow to make; each test has a time limit of its own.
settings.register_profile("pysync", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pysync")

# Who is started in the background by a shell ignores it, and so would all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

PROTOCOL = Path(__file__).parent / "protocol.json"

ISSUER = IdentityKeys.from_private(b"\x11" * 32, b"\x31" * 32)
SUBJECT = IdentityKeys.from_private(b"\x22" * 32, b"\x42" * 32)
STRANGER = IdentityKeys.from_private(b"\x77" * 32, b"\x78" * 32)


@dataclass
class Reply:
    """An answer, read."""

    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        return self.status, self.json["error"]


@dataclass
class Browser:
    """Sends requests to one service, as they are given."""

    base: str
    session: aiohttp.ClientSession

    async def request(
        self, method: str, target: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """`target` goes on the wire as it is; a `body` that is not bytes goes as JSON."""
        sent = dict(headers or {})
        if body is not None and "Content-Type" not in sent:
            sent["Content-Type"] = "application/json"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        url = URL(self.base + target, encoded=True)
        async with self.session.request(method, url, data=data, headers=sent) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def pull(self, key: str, headers: dict[str, str] | None = None) -> Reply:
        return await self.request("GET", f"/pull/{key}", headers=headers)

    async def push(
        self, key: str, data: object, base: str | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        return await self.request("POST", f"/push/{key}", {"data": data, "baseHash": base}, headers)


@dataclass
class Signed(Browser):
    """Signs its requests with `keys` under `certificate`; `tamper` may change the headers before they go."""

    keys: IdentityKeys
    certificate: Certificate
    presenter: bool = False
    prefix: str = ""
    tamper: Callable[[dict[str, str]], None] = field(default=lambda headers: None)
    ts_ms: int | None = None
    nonce: bytes | None = None

    async def request(
        self, method: str, target: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Reply:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        merged = {**self.headers(method, target, data), **(headers or {})}
        self.tamper(merged)
        return await super().request(method, target, data if body is not None else None, merged)

    def headers(self, method: str, target: str, body: bytes) -> dict[str, str]:
        signed = signing.sign_request(
            self.keys,
            method,
            self.prefix + target,
            body,
            signing.canonical_host(self.base),
            self.ts_ms or wall_clock_ms(),
            self.nonce or os.urandom(16),
        )
        if self.presenter:
            signed["X-Starfish-Pub"] = self.keys.ed_pub
        return {"Authorization": self.certificate.authorization, **signed}


def minted_at() -> dict[str, Any]:
    """Clock and nonce for a certificate minted now."""
    return {"now_s": wall_clock_ms() // 1000, "nonce": os.urandom(16)}


def root_device(keys: IdentityKeys, **options: Any) -> Certificate:
    """The certificate of a root's own first device."""
    return issuing.issue_device_certificate(keys, keys.ed_pub, keys.kem_pub, **minted_at(), **options)


def encoded(members: dict[str, Any]) -> str:
    """An Authorization header that presents `members` as a certificate, whatever they are."""
    return "Cap " + base64.b64encode(json.dumps(members, separators=(",", ":")).encode()).decode()


Start = Callable[..., Awaitable[str]]
MakeNode = Callable[..., Node]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Starts services in this process: `await start(members, store=..., now_ms=...)` -> base URL."""
    async with AsyncExitStack() as stack:

        async def start_one(members: dict[str, Any], store: Store | None = None, **options: Any) -> str:
            parsed = config.parse({"version": 1, "store": "memory:", **members})
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


@pytest_asyncio.fixture
async def base(start: Start) -> str:
    """The service under test: at PYSYNC_URL (started with tests/protocol.json), else one made here."""
    return os.environ.get("PYSYNC_URL") or await start(json.loads(PROTOCOL.read_text()))


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
def stranger(base: str, session: aiohttp.ClientSession) -> Signed:
    """A root device of a key that nobody trusts."""
    return Signed(base, session, STRANGER, root_device(STRANGER, collections=("rooms", "*")))


@pytest.fixture
def unique() -> Callable[[str], str]:
    """Keys that no other test, and no earlier run against a service that stays, has used."""
    mark = os.urandom(6).hex()
    return lambda prefix: f"{prefix}/{mark}"


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


@pytest_asyncio.fixture(params=["memory", "local"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Store]:
    """An empty store, of each kind in turn, dated by `clock`."""
    local = request.param == "local"
    store: Store = await LocalStore.open_folder(tmp_path / "data", clock) if local else MemoryStore(clock)
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
