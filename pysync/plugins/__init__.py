"""The types with which plugins are written (docs/reference/plugins.md). A plugin is any object with a `name`
and at least one hook; `Plugin` names them all.

`hooks.py` calls the hooks, `loader.py` finds and checks plugins.
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
from pysync.protocol import JSON_TYPE
from pysync.store import Store

__all__ = [
    "HOOK_TIMEOUT_S",
    "MAX_RUNNING_HOOKS",
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
"""Time limit of a hook for one request (docs/reference/plugins.md#errors-and-time-limits)."""
MAX_RUNNING_HOOKS: Final = 1_000
"""Hooks of one plugin that may run in a process. A request that needs another is refused."""
SHUTDOWN_TIMEOUT_S: Final = 10.0
"""Time limit for leaving a lifespan; then the process ends without it."""


@dataclass(frozen=True, slots=True)
class PluginRequest:
    """A request that is about to be served: `action` (pull, push or list) on a collection, at the document
    key `key`, which is the collection's template filled with `params` (for a list: its prefix). `caller` has
    the roles that are known so far: `authorize` sees it without the roles that plugins grant, and never with
    `self`. Of a certificate's roles it has only those that the configuration names."""

    action: Action
    collection: str
    namespace: str | None
    params: Mapping[str, str]
    key: str
    caller: Caller


@dataclass(frozen=True, slots=True)
class PluginPush:
    """A push that is about to be stored. `data` is the sanitised JSON text that would be stored, and `hash`
    is its hash; for an append to a log, those of its element."""

    request: PluginRequest
    data: bytes
    hash: str
    base_hash: str | None
    request_key: str | None = None
    """The identifier of repetitions of this push (its `Idempotency-Key` with the caller and the key); None
    without one."""


@dataclass(frozen=True, slots=True)
class PullResponse:
    """A plugin's response to a pull: status 200 with a body. A `version` becomes its ETag, and If-None-Match
    is honoured. Raises ValueError if the content type or version does not fit into a header, and TypeError if
    the body is not bytes."""

    body: bytes
    content_type: str = JSON_TYPE
    version: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.body, bytes):
            raise TypeError(f"body is {type(self.body).__name__}, not bytes")
        headers = self.content_type + (self.version or "")
        if not (headers.isascii() and headers.isprintable()) or '"' in (self.version or ""):
            raise ValueError("content_type and version must be printable ASCII, the version without quotes")


@dataclass(frozen=True, slots=True)
class PushResponse:
    """A plugin's response to a push that it stored or forwarded. `extras` are members of the response beside
    `hash` and `timestamp`. Raises TypeError for values that JSON cannot represent.

    `params` are those of the written document, if they differ from the request's. `announced` is True if the
    plugin announced the change itself, together with its write (`Outbox.write`).
    """

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
    """The location of what a plugin stores for a collection: files of the store whose keys are `template`,
    filled with the parameters of the collection's path, and `suffix`. Pulls of the collection return these
    files, and its lists contain their names without the suffix. Lists end before the name that
    `visible_before()` returns, unless it is None, because a file with a smaller name may still appear."""

    template: str
    suffix: str = ""
    visible_before: Callable[[], str | None] = lambda: None


@dataclass(slots=True)
class PluginContext:
    """The objects that serve requests, for plugins to work with while the service runs. `config` is the
    configuration in force, of which a reload makes another one. `sweeps` is True in the one process of its
    machine that does work which must be done only once. `count(metric, *labels, by=1)` increments a metric
    of `pysync.server.process.metrics.COUNTERS`, and `set_gauge(metric, value, *labels)` sets one of `GAUGES`.
    """

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
    """Reports corrupt stored objects."""
    set_gauge: Callable[..., None] = lambda metric, value, *labels: None


CapValidator = Callable[[Certificate], str | None]
"""Returns the code with which a certificate with a valid signature is rejected, or None. The code is logged;
the caller gets 401. The result is cached, so it must depend on the certificate alone."""


class Plugin(Protocol):
    """All hooks. A plugin implements those that it needs. A method whose name nearly equals a hook is
    rejected, unless it begins with an underscore."""

    name: str
    """The name in logs and metrics, unique among the plugins of a service."""

    cap_validators: Mapping[str, CapValidator]
    """Validators by kind of certificate: `device`, `member`, `audience`."""

    stored_files: Mapping[str, FileBackedCollection]
    """Locations by name of the collection, in every namespace."""

    def lifespan(self, services: PluginContext) -> AbstractAsyncContextManager[None]:
        """Entered before the first request and left after the last. An error on entering keeps the server
        from starting; leaving is cancelled after `SHUTDOWN_TIMEOUT_S`."""

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        """Return roles that the caller has for this request only, in addition to its own. Called for every
        pull, push and list, also of open collections, for each entry of a batch and each event of a stream.
        It must not change anything."""

    async def before_pull(self, request: PluginRequest) -> None:
        """Called when a pull of one document or log is authorised, before the store is read; also for each
        document of a batch, bundle or keyring fold."""

    async def intercept_pull(self, request: PluginRequest) -> PullResponse | None:
        """Return the response to a pull in place of the stored document, or None to leave it to the next
        plugin or the store. Also called for each document of a batch, bundle or keyring fold, which cannot
        carry such a response: there the document counts as not found."""

    async def intercept_push(self, push: PluginPush) -> PushResponse | None:
        """Store a push, which is authorised, validated and metered, in place of the store, or return None to
        leave it to the next plugin or the store. The change is announced like any other write."""

    async def before_delete(self, request: PluginRequest) -> None:
        """Called when the delete of a document, file or log is authorised, before the store removes it. To
        all other hooks a delete is a push. If a plugin has `intercept_push` and not this hook, every delete
        is rejected with 403, because it might evade what the plugin does with pushes."""

    async def after_write(self, event: WriteEvent) -> None:
        """Called after each push with status 200, in the order in which they end, before the response is
        sent; called again when a push is repeated (Idempotency-Key)."""

    async def after_delete(self, event: WriteEvent) -> None:
        """Called after each delete with status 200, as `after_write` after a push. `event.removed` is True,
        and `event.hash` is that of the removed version."""
