"""The hooks of a service's plugins, called as `pysync.plugins` promises."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TypeVar

from pysync.auth.certificates import Certificate
from pysync.errors import (
    AuthorizationError,
    Forbidden,
    InternalError,
    NotFound,
    Overloaded,
    PysyncError,
    RolesUnavailable,
)
from pysync.model import WriteEvent
from pysync.plugins import (
    HOOK_TIMEOUT_S,
    MAX_RUNNING_HOOKS,
    SHUTDOWN_TIMEOUT_S,
    FileBackedCollection,
    Plugin,
    PluginContext,
    PluginPush,
    PluginRequest,
    PullResponse,
    PushResponse,
)

log = logging.getLogger("pysync.plugins")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered, for logs. Set where any request concerns a plugin."""

T = TypeVar("T")


class _Hook(NamedTuple):
    """A hook of one plugin."""

    plugin: str
    name: str
    call: Callable[..., Any]

    async def wait(self, about: object) -> Any:
        """Await the hook and return its result."""
        return await _await_isolated(self.call(about))


class Hooks:
    """The hooks of `plugins`, which `load_plugins` has checked, in their order. `failed` counts a failure, by
    plugin and hook, and `rejected` a request for which too many hooks of a plugin are running."""

    def __init__(
        self,
        plugins: Sequence[Any] = (),
        failed: Callable[[str, str], None] = lambda plugin, hook: None,
        timeout_s: float = HOOK_TIMEOUT_S,
        rejected: Callable[[str], None] = lambda plugin: None,
    ) -> None:
        self._failed = failed
        self._rejected = rejected
        self._running: Counter[str] = Counter()
        self._timeout_s = timeout_s
        self._lifespans = _each(plugins, "lifespan")
        self._authorize = _each(plugins, "authorize")
        self._before_pull = _each(plugins, "before_pull")
        self._intercept_pull = _each(plugins, "intercept_pull")
        self._intercept_push = _each(plugins, "intercept_push")
        self._after_write = _each(plugins, "after_write")
        self._before_delete = _each(plugins, "before_delete")
        self._after_delete = _each(plugins, "after_delete")
        self._ignoring_deletes = {hook.plugin for hook in self._intercept_push} - {
            hook.plugin for hook in self._before_delete
        }
        self._validators: dict[str, list[_Hook]] = {}
        self.stored_files: Final[dict[str, FileBackedCollection]] = {}
        """Locations of collections that plugins store, by name."""
        for plugin in plugins:
            if implements(plugin, "cap_validators"):
                for kind, validator in plugin.cap_validators.items():
                    hook = _Hook(plugin.name, "cap_validators", validator)
                    self._validators.setdefault(kind, []).append(hook)
            if implements(plugin, "stored_files"):
                self.stored_files.update(plugin.stored_files)
        self._entered = AsyncExitStack()
        self.has_authorize_hooks: Final = bool(self._authorize)
        self.has_pull_hooks: Final = bool(self._before_pull or self._intercept_pull)
        self.has_push_hooks: Final = bool(self._intercept_push or self._after_write)
        self.has_certificate_hooks: Final = bool(self._validators)

    async def open(self, services: PluginContext) -> None:
        """Enter the plugins' lifespans. Raises ValueError if one fails; `close` leaves those entered
        before."""
        for hook in self._lifespans:
            try:
                context = hook.call(services)
                await _await_isolated(context.__aenter__())
            except Exception as error:
                raise ValueError(f"plugin {hook.plugin}: it does not start: {error}") from error
            self._entered.push_async_callback(self._leave, hook, context)

    async def close(self) -> None:
        """Leave the lifespans, the last entered first. Errors are counted and logged."""
        await self._entered.aclose()

    async def _leave(self, hook: _Hook, context: AbstractAsyncContextManager[None]) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await _await_isolated(context.__aexit__(None, None, None))
        except Exception as error:
            self._fail(hook, error)

    def validate_certificate(self, certificate: Certificate) -> str | None:
        """Return the code with which a plugin rejects a certificate with a valid signature; None if none
        does. Raises AuthorizationError if a plugin fails."""
        for hook in self._validators.get(certificate.kind, ()):
            try:
                code = hook.call(certificate)
            except Exception as error:
                self._fail(hook, error)
                raise AuthorizationError from None
            if code is not None:
                return str(code)
        return None

    async def roles(self, request: PluginRequest) -> frozenset[str]:
        """Return the roles that plugins grant for `request`. Raises AuthorizationError, RolesUnavailable
        after 5 s in all, and the error with which a plugin rejects the request."""
        given: set[str] = set()
        hook = self._authorize[0]
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                for hook in self._authorize:
                    self._require_room(hook)
                    given.update(_roles(await self._run(hook, request)))
        except PysyncError:
            raise
        except Exception as error:
            self._fail(hook, error)
            raise (RolesUnavailable if deadline.expired() else AuthorizationError) from None
        return frozenset(given)

    async def run_pull_hooks(self, request: PluginRequest) -> PullResponse | None:
        """Run the pull hooks of an authorised pull and return a plugin's response in place of the stored
        document; None without one. Raises InternalError, and the error with which a plugin rejects the
        request."""
        for hook in self._before_pull:
            await self._call(hook, request, object)
        for hook in self._intercept_pull:
            response = await self._call(hook, request, PullResponse)
            if response is not None:
                return response
        return None

    async def veto_nested_read(self, request: PluginRequest) -> None:
        """Run the pull hooks of a document that is read together with others. Raises as `run_pull_hooks`,
        and NotFound if a plugin would replace the response, because such a read cannot carry one."""
        if await self.run_pull_hooks(request) is not None:
            raise NotFound("Collection not found")

    async def run_push_hooks(self, push: PluginPush) -> PushResponse | None:
        """Run the push hooks and return the response of the plugin that stored the push; None if none did.
        Raises as `run_pull_hooks`."""
        for hook in self._after_write:  # later it would be too late
            self._require_room(hook)
        for hook in self._intercept_push:
            response = await self._call(hook, push, PushResponse)
            if response is not None:
                return response
        return None

    async def run_delete_hooks(self, request: PluginRequest) -> None:
        """Run the hooks of an authorised delete. Raises as `run_pull_hooks`, and Forbidden if a plugin that
        intercepts pushes has no hook for deletes."""
        if self._ignoring_deletes:
            raise Forbidden(
                reason=f"plugins without before_delete: {', '.join(sorted(self._ignoring_deletes))}"
            )
        for hook in self._after_delete:  # later it would be too late
            self._require_room(hook)
        for hook in self._before_delete:
            await self._call(hook, request, object)

    async def run_after_write(self, event: WriteEvent) -> None:
        """Announce a push or a delete that was applied. Errors are counted and logged."""
        for hook in self._after_delete if event.removed else self._after_write:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._run(hook, event)
            except Exception as error:
                self._fail(hook, error)

    def _require_room(self, hook: _Hook) -> None:
        """Raise Overloaded if no other hook of the plugin may run."""
        if self._running[hook.plugin] >= MAX_RUNNING_HOOKS:
            self._rejected(hook.plugin)
            raise Overloaded

    async def _run(self, hook: _Hook, about: object) -> Any:
        self._running[hook.plugin] += 1
        try:
            return await hook.wait(about)
        finally:
            self._running[hook.plugin] -= 1

    async def _call(self, hook: _Hook, about: PluginRequest | PluginPush, kind: type[T]) -> T | None:
        self._require_room(hook)
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await self._run(hook, about)
            if result is not None and not isinstance(result, kind):
                raise TypeError(f"it returned {type(result).__name__}, not {kind.__name__} or None")
            return result
        except PysyncError:
            raise
        except Exception as error:
            self._fail(hook, error)
            raise InternalError(extras={"requestId": request_id.get()}) from None

    def _fail(self, hook: _Hook, error: Exception) -> None:
        """Count and log an error of a hook."""
        self._failed(hook.plugin, hook.name)
        said = "took too long" if isinstance(error, TimeoutError) else "failed"
        log.error(
            "plugin %s: %s %s", hook.plugin, hook.name, said, exc_info=error,
            extra={"request_id": request_id.get()},
        )  # fmt: skip


async def _await_isolated(waiting: Awaitable[T]) -> T:
    """Return or raise what the coroutine does. If the plugin cancelled a task of its own, the hook has
    failed, and nothing here is cancelled."""
    try:
        return await waiting
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("what it waited for was cancelled") from error


def implements(plugin: object, hook: str) -> bool:
    """Return True if the plugin defines the hook itself, rather than inheriting it from `Plugin`."""
    own = getattr(type(plugin), hook, None)
    return hasattr(plugin, hook) and (own is None or own is not getattr(Plugin, hook, None))


def _each(plugins: Iterable[Any], hook: str) -> list[_Hook]:
    return [_Hook(plugin.name, hook, getattr(plugin, hook)) for plugin in plugins if implements(plugin, hook)]


def _roles(given: object) -> list[str]:
    """Return the roles that an `authorize` returned. Raises TypeError for anything else, also for one
    string, which iterates over letters."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"it returned {type(given).__name__}, not roles")
    roles = list(given)
    if not all(isinstance(role, str) for role in roles):
        raise TypeError("it returned roles that are no text")
    return roles
