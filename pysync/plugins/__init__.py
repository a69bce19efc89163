"""Plugins: objects with a name and hooks, all of them optional (docs/reference/plugins.md).

A plugin is any object with a `name` and at least one hook; `Plugin` names them all. The configuration names
plugins (`"plugins": ["package.module:object"]`, or the name of an entry point of the group `pysync.plugins`),
or `create_app` is given them. They are asked in that order. What the configuration names may also be a class
or a function without parameters, which makes the plugin: each process makes its own.

`authorize`, `before_pull`, `intercept_pull` and `intercept_push` may refuse the request by raising an error
of `pysync.errors`; anything else that they raise, or taking longer than `HOOK_TIMEOUT_S`, is counted, logged,
and `500` (an `authorize` that takes too long: `503`). What `after_write` raises is counted and logged, and
the push's answer stays what it is.

`hooks.py` calls the hooks, `loader.py` finds and checks plugins. docs/reference/plugins.md is for their
authors.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from pysync.auth.certificates import Certificate
from pysync.config import Action, Config
from pysync.coordinator import Coordinator
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import Outbox
from pysync.model import Caller, WriteEvent, WriteResult
from pysync.store import Store

__all__ = [
    "HOOK_TIMEOUT_S",
    "SHUTDOWN_TIMEOUT_S",
    "Caller",
    "CapValidator",
    "Certificate",
    "FileBackedCollection",
    "Plugin",
    "PluginContext",
    "PluginPush",
    "PluginRequest",
    "PullResponse",
    "PushResponse",
    "WriteEvent",
    "WriteResult",
]

HOOK_TIMEOUT_S: Final = 5.0
"""How long a hook of one request may take (docs/reference/plugins.md#errors-and-time-limits)."""
SHUTDOWN_TIMEOUT_S: Final = 10.0
"""How long a lifespan may take to end: then the process ends without it."""


@dataclass(frozen=True, slots=True)
class PluginRequest:
    """What a request is about to do: `action` (pull, push or list) on a collection, at the document key
    `key`, which is the collection's template with `params` (of a list: its prefix). `caller` holds its roles
    as far as they are known: `authorize` sees them without those that plugins give, and `self` is never among
    them. Of a certificate's roles only those are there that the configuration names."""

    action: Action
    collection: str
    namespace: str | None
    params: Mapping[str, str]
    key: str
    caller: Caller


@dataclass(frozen=True, slots=True)
class PluginPush:
    """A push that is about to be made. `data` is what the client sent, sanitised, as the JSON text that would
    be stored, and `hash` is its hash; of an append to a log, of its element."""

    request: PluginRequest
    data: bytes
    hash: str
    base_hash: str | None
    request_key: str | None = None
    """Under what a repetition of this push is known again (its `Idempotency-Key`, with caller and key), for
    `Coordinator.claim`; None where the client asked for nothing."""


@dataclass(frozen=True, slots=True)
class PullResponse:
    """A plugin's answer to a pull: its body, `200`. With a `version` it has that as its ETag and honours
    If-None-Match. Raises ValueError where content type or version do not fit in a header, TypeError where the
    body is no bytes."""

    body: bytes
    content_type: str = "application/json"
    version: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.body, bytes):
            raise TypeError(f"body is {type(self.body).__name__}, not bytes")
        headers = self.content_type + (self.version or "")
        if not (headers.isascii() and headers.isprintable()) or '"' in (self.version or ""):
            raise ValueError("content_type and version must be printable ASCII, the version without quotes")


@dataclass(frozen=True, slots=True)
class PushResponse:
    """A plugin's answer to a push: it has stored what the push brought, or taken it elsewhere. `extras` are
    members of the answer beside `hash` and `timestamp`. Raises TypeError for what is no JSON.

    `params` are those of the document that was written, where they are not the request's. `announced`: the
    plugin has told of the change itself, together with its write (`Outbox.write`)."""

    written: WriteResult
    extras: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] | None = None
    announced: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.written, WriteResult):
            raise TypeError(f"written is {type(self.written).__name__}, not Written")
        orjson.dumps(dict(self.extras))
        if self.params is not None and not all(isinstance(value, str) for value in self.params.values()):
            raise TypeError("params are texts")


@dataclass(frozen=True, slots=True)
class FileBackedCollection:
    """Where a plugin keeps what was pushed to a collection: as files of the store, whose keys are `template`,
    filled in with the parameters of the collection's path, and `suffix`. Pulls of the collection are answered
    with these files, and its lists name them, without the suffix. `visible_before()` is a name: lists end
    before it, where it is not None, because a file may still come to light that lies before those that are
    there."""

    template: str
    suffix: str = ""
    visible_before: Callable[[], str | None] = lambda: None


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What a plugin works with while the service runs: the same objects that serve requests. `sweeps`: this
    process is the one of its machine's that does what need be done only once. `count(metric, *labels, by=1)`
    counts more of a metric of `pysync.server.metrics.COUNTERS`."""

    config: Config
    store: Store
    coordinator: Coordinator
    outbox: Outbox
    documents: Documents
    files: Files
    logs: AppendLogs
    now_ms: Callable[[], int]
    sweeps: bool
    count: Callable[..., None]
    corruption: CorruptionReporter = field(default_factory=CorruptionReporter)
    """Is called with the key of a corrupt stored object."""


CapValidator = Callable[[Certificate], str | None]
"""Looks at a certificate whose signature holds: None, or the code by which it is refused (logged; the caller
gets 401). A certificate is looked at once and then remembered, so the same one gets the same answer. No
coroutine: it does not wait."""


class Plugin(Protocol):
    """Every hook. A plugin has those that it needs; a method whose name is nearly one of these is refused,
    unless it begins with an underscore."""

    name: str
    """Names it in logs and metrics; each plugin of a service has its own."""

    cap_validators: Mapping[str, CapValidator]
    """By kind of certificate: `device`, `member`, `audience`."""

    stored_files: Mapping[str, FileBackedCollection]
    """By name of the collection, in every namespace."""

    def lifespan(self, services: PluginContext) -> AbstractAsyncContextManager[None]:
        """Entered before the service answers its first request, left after its last. What it raises on
        entering keeps the server from starting; on leaving it is cancelled after `SHUTDOWN_TIMEOUT_S`."""

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        """Roles that the caller has beside its own, for this request alone: of every pull, push and list,
        also of open collections, of each entry of a batch and each event of a stream. It reads, and changes
        nothing."""

    async def before_pull(self, request: PluginRequest) -> None:
        """Called once the pull of one document or log is allowed, before the store is read: also of each that
        a batch, a bundle or a keyring fold is about to read."""

    async def intercept_pull(self, request: PluginRequest) -> PullResponse | None:
        """The answer to the pull, instead of what is stored; None leaves it to the next plugin, or the
        store. Asked for each document of a batch, a bundle or a keyring fold too, which cannot carry such an
        answer: there it is as if the document were in no collection."""

    async def intercept_push(self, push: PluginPush) -> PushResponse | None:
        """Take the push, which is allowed, checked and counted, instead of the store; None leaves it to the
        next plugin, or the store. What is taken is announced like any other write."""

    async def after_write(self, event: WriteEvent) -> None:
        """Called after each push that was answered 200, in the order in which they ended, before the answer
        is sent; of a push that is repeated (Idempotency-Key), again."""
