"""One sender for each webhook. In one process of a service it follows the change log and posts the changes of
the webhook's collections; if that process ends, another continues.

A receiver that is away costs no memory and no work for each write: a repetition reads its changes again.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from typing import Final

import aiohttp
import orjson
from aiohttp.abc import AbstractResolver

from pysync._core import PanicException
from pysync.changelog import Change
from pysync.config import Config, WebhookConfig
from pysync.coordinator import LEASE_RENEW_S, holds_lease
from pysync.engine.changes import parse_change
from pysync.engine.subscriptions import KeyMatch, event_json
from pysync.errors import Unavailable
from pysync.plugins import PluginContext
from pysync.plugins.projection.sources import KeyResolver
from pysync.plugins.projection.spec import is_source
from pysync.store import ABSENT, Etag, EtagMismatch, StoredObject
from pysync.webhooks.delivery import Rejection, open_session, post

BATCH: Final = 100
"""Number of changes that are read, and posted, together."""
TIMEOUT_S: Final = 10.0
REST_S: Final = 0.1
"""Seconds after the last change before the log is read again. Changes of this time are posted together."""
SAVE_EVERY_S: Final = 60.0
"""Seconds after which a position that moves past changes of other collections is saved."""
MAX_WAIT_S: Final = 3600.0
"""Greatest time between two attempts."""

log = logging.getLogger("pysync.webhooks")


@dataclass(frozen=True, slots=True)
class Position:
    """The receiver has accepted everything up to the id `after`. The changes up to `until` that belong to
    `collections` are its next batch; `""` without one. With `is_reset` it is told that it misses them."""

    after: str
    until: str = ""
    collections: Sequence[str] = field(default_factory=list)  # as JSON is read
    is_reset: bool = False


@dataclass(slots=True)
class Webhooks:
    """The webhooks of a service. `sleep` waits between attempts, `resolver` looks up the hosts of receivers,
    which have `timeout_s` to respond."""

    services: PluginContext
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    timeout_s: float = TIMEOUT_S
    resolver: AbstractResolver | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    async def update(self, config: Config) -> None:
        """Send to the webhooks of `config`, and to no others. A new name begins with the changes after this
        call, unless the store does not answer in half of `timeout_s`. All others continue where they were, at
        once, also those whose receiver was gone."""
        await self.close()
        keys = KeyResolver(config)
        senders = [Sender(webhook, keys, self) for webhook in config.webhooks]
        await asyncio.gather(*map(self._begin, senders))
        self._tasks = [asyncio.create_task(sender.run()) for sender in senders]

    async def _begin(self, sender: "Sender") -> None:
        try:
            async with asyncio.timeout(self.timeout_s / 2):
                await sender.begin()
        except (Unavailable, TimeoutError) as error:
            why = error.detail if isinstance(error, Unavailable) else "the store does not answer"
            log.warning("webhook %s begins later: %s", sender.name, why)

    async def close(self) -> None:
        """Stop sending, within two seconds. Changes that a receiver has not accepted then are sent again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


class Sender:
    """Posts the changes of one webhook while this process holds the lease of its name."""

    def __init__(self, webhook: WebhookConfig, keys: KeyResolver, owner: Webhooks) -> None:
        self.name: Final = webhook.name
        self._webhook = webhook
        self._keys = keys
        self._owner = owner
        self._services = owner.services
        self._log = owner.services.outbox.log
        digest = sha256(webhook.name.encode()).hexdigest()[:32]
        self._key, self._lease = f"_pysync/webhooks/{digest}", f"webhook-{digest}"
        self._position = self._saved = Position("")
        self._etag, self._saved_at = "", -inf
        self._failures = 0
        self._waiting_since_ms: int | None = None
        """When the oldest change was written that the receiver has not accepted; None if there is none."""

    async def begin(self) -> StoredObject:
        """Return the stored position. That of a new name is the newest change. Raises Unavailable."""
        store = self._services.store
        while not isinstance(found := await store.get(self._key), StoredObject):
            with suppress(EtagMismatch):  # another process did
                await store.put(self._key, orjson.dumps(Position(await self._log.last_id())), expect=ABSENT)
        return found

    async def run(self) -> None:
        """Send while this process holds the lease, until cancelled."""
        sending = None
        try:
            while True:
                if not await holds_lease(self._services.coordinator, self._lease):
                    await _cancel(sending)
                elif sending is None or sending.done():
                    sending = asyncio.create_task(self._send())
                await asyncio.sleep(LEASE_RENEW_S)
                self._report_lag()
        finally:
            await _cancel(sending)

    async def _send(self) -> None:
        """Post one batch after another. Return if another process sends, or something failed."""
        name = self.name
        try:
            await self._load()
            async with open_session(self._webhook, self._owner.timeout_s, self._owner.resolver) as session:
                while True:
                    body = await self._next_body()
                    posting = asyncio.create_task(self._post(session, body))
                    try:
                        rejected = await asyncio.shield(posting)
                    except asyncio.CancelledError:
                        await asyncio.wait({posting}, timeout=LEASE_RENEW_S)
                        raise
                    if rejected is not None:
                        await self._wait_after(rejected)
        except EtagMismatch:
            log.info("webhook %s: another process sends", name)
        except Unavailable as error:
            log.warning("webhook %s waits: %s", name, error.detail)
        except (Exception, PanicException):
            log.exception("webhook %s failed, and continues from its last position", name)
        finally:
            with suppress(EtagMismatch, Unavailable, TimeoutError):
                async with asyncio.timeout(LEASE_RENEW_S):
                    await self._save()
            self._waiting_since_ms = None
            self._report_lag()

    async def _load(self) -> None:
        """Read the position. One that cannot be read counts as one whose changes are gone."""
        found = await self.begin()
        self._etag, self._failures = found.etag, 0
        try:
            self._position = self._saved = Position(**orjson.loads(found.body))
        except (ValueError, TypeError):
            self._position = Position("", await self._log.last_id(), is_reset=True)

    async def _save(self) -> None:
        """Save the position. Raises EtagMismatch if another process has moved it."""
        if self._position != self._saved:
            text = orjson.dumps(self._position)
            self._etag = await self._services.store.put(self._key, text, expect=Etag(self._etag))
            self._saved, self._saved_at = self._position, asyncio.get_running_loop().time()

    async def _next_body(self) -> bytes:
        """Return what is posted next, once there is something. Its end is saved first, so that a repetition
        is the same."""
        while True:
            events = await self._read_batch()
            if not self._position.until:
                if asyncio.get_running_loop().time() >= self._saved_at + SAVE_EVERY_S:
                    await self._save()
                await self._log.wait_for_change(self._position.after)
                await asyncio.sleep(REST_S)
                continue
            await self._save()
            if self._position.is_reset:
                return b'{"type":"reset"}'
            if events:
                return b'{"type":"changes","changes":[%b]}' % b",".join(events)
            self._position = Position(self._position.until)  # its collections are not the webhook's any more

    async def _read_batch(self) -> list[bytes]:
        """Return the events of the position's batch. Without one, begin the next, or move the position behind
        all changes. If changes are gone, the batch is a reset."""
        was, events, is_complete = self._position, list[bytes](), self._position.is_reset
        after, until, names = was.after, was.until, was.collections or self._webhook.collections
        while not is_complete:
            page = await self._log.read(after, BATCH)
            if page is None or any(is_source(names, *one) for _, each in page for one in each.erased_from):
                self._waiting_since_ms = self._waiting_since_ms or self._services.now_ms()
                self._position = Position(was.after, await self._log.last_id(), is_reset=True)
                return []
            is_complete = len(page) < BATCH
            for after, change in page:
                if found := self._events(change, names):
                    events += found
                    until = was.until or after
                if after == was.until or (not was.until and len(events) >= BATCH):
                    is_complete = True
                    break
            await asyncio.sleep(0)  # the log may return at once
        if not was.until:
            self._position = Position(was.after, until, names) if until else Position(after)
        return events

    def _events(self, change: Change, names: Sequence[str]) -> list[bytes]:
        """Return a change as an event for each of these collections that the webhook has and that contain the
        written document, as change streams have them."""
        parsed = parse_change(change)
        found = self._keys.locate_all(
            parsed.ref, lambda *one: is_source(names, *one) and is_source(self._webhook.collections, *one)
        )
        if found and self._waiting_since_ms is None:
            self._waiting_since_ms = parsed.timestamp_ms
        return [event_json(parsed, KeyMatch((one.namespace, one.name), one.params, one.key)) for one in found]

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> Rejection | None:
        """Post a body, and move the position behind it if the receiver accepts it."""
        self._report_lag()
        now_s = self._services.now_ms() // 1000
        rejected = await post(session, self._webhook, self._position.until, body, now_s)
        if rejected is not None:
            self._services.count("pysync_webhook_failures", self.name)
            return rejected
        self._services.count("pysync_webhook_deliveries", self.name)
        self._position, self._saved_at = Position(self._position.until), -inf
        self._failures, self._waiting_since_ms = 0, None
        return None

    async def _wait_after(self, rejected: Rejection) -> None:
        """Return when it is time for the next attempt."""
        name, reason, status, wait_s = self.name, *rejected
        if status == 410:
            log.error("webhook %s ends until a reload or restart: %s", name, reason)
            await asyncio.Event().wait()  # and keeps the lease, so that no other process tries
        self._failures += 1
        if wait_s is None:
            wait_s = random.uniform(0.5, 1) * min(2**self._failures, MAX_WAIT_S)  # noqa: S311 (spreads load)
        wait_s = min(max(wait_s, 1), MAX_WAIT_S)
        log.warning("webhook %s failed, will try again in %.0f s: %s", name, wait_s, reason)
        await self._owner.sleep(wait_s)

    def _report_lag(self) -> None:
        now_ms = self._services.now_ms()
        since_ms = now_ms if self._waiting_since_ms is None else self._waiting_since_ms
        lag_s = max(0, now_ms - since_ms) // 1000
        self._services.set_gauge("pysync_webhook_lag_seconds", lag_s, self.name)


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
