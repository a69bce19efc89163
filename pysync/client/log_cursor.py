"""A cursor that reads a log, each element once (docs/reference/protocol.md#read-a-log)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import suppress

import orjson

from pysync._core import canonicalize, verify_author
from pysync.auth.signing import APPEND_AUTHOR
from pysync.client.client import Client
from pysync.client.models import LogElement, ParamSet
from pysync.client.polling import WatchTarget, follow
from pysync.client.transport import document_key
from pysync.errors import CheckpointTooOld, FullNotAllowed

QUIET_FETCH_COUNT = 100
"""Number of newest elements requested after CheckpointTooOld. A log that was quiet for that long has few new
ones."""


class BadAuthorProof(ValueError):
    """A pulled `element` is unsigned, has an unexpected author, or its signature does not match its data in
    this log."""

    def __init__(self, element: LogElement) -> None:
        super().__init__(f"the author proof of the element at {element.ts_ms} does not hold")
        self.element = element


class LogCursor:
    """A position in the log at `key`. Each `pull` returns the elements appended since, each exactly once, and
    moves the position.

    For a collection with `forceFullFetch` each pull transfers the whole log and returns the new elements. A
    log that expired and restarted continues after the position, because timestamps do. If the first pull
    found nothing and the server rejects `full`, an element with timestamp 0, which no server assigns, cannot
    be reached. The cursor does not keep elements. Pulls of several tasks wait for each other.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        *,
        field: str | None = "items",
        first: int | None = None,
        since: int | None = None,
        seen: Iterable[LogElement] = (),
        verify: bool = False,
        authors: Iterable[str] | None = None,
        skip_bad_proofs: bool = False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """The first pull reads the whole log, which a server may reject (FullNotAllowed), or the newest
        `first` elements, 0 for none. To continue an earlier cursor, pass its `checkpoint_ms` as `since`, or
        the elements already `seen`.

        `verify` checks every author proof. `authors` are the only public keys that may have written. For a
        proof that does not hold, a pull raises BadAuthorProof and stays where it was, or with
        `skip_bad_proofs` omits the element. A proof covers the data and the log, but not the timestamp: the
        server is trusted for timestamps and for completeness.

        Raises ValueError for invalid bounds, and for a `since` before the elements already seen.
        """
        newest = max((element.ts_ms for element in seen), default=None)
        if since is not None and since < (newest or 0):
            raise ValueError("since must not be negative, nor before an element that is known")
        if first is not None and first < 0:
            raise ValueError("first must not be negative")
        self.key = key
        self._client = client
        self._field = field
        self._first = first
        self.checkpoint_ms = newest if since is None else since
        """The timestamp of the newest element that was returned or skipped; None before the first. Pass it as
        `since` to continue from here."""
        self.has_more = False
        """True if the server left out elements that the next pull returns."""
        self._has_pulled = False
        self._authors = None if authors is None else frozenset(author.lower() for author in authors)
        self._verify = verify or authors is not None
        self._skip = skip_bad_proofs
        self._sleep = sleep
        self._lock = asyncio.Lock()

    async def pull(self) -> list[LogElement]:
        """Return the new elements, in the log's order. If the server returns only some of them
        (`maxPullLimit`) they are the oldest, and `has_more` is True: the next pull continues from there.

        Raises as `Client.pull`, and BadAuthorProof; the cursor then stays where it was. Raises
        CheckpointTooOld if elements after the position have left the log (`keepElements`, `keepMs`): continue
        with a new cursor from `earliest_ms` of the error. Also if the position is older than the log's
        `maxCheckpointAgeMs` and neither the newest elements nor `full` reach back to it: start a new cursor,
        for example with `first`. Raises
        FullNotAllowed if the collection has `forceFullFetch` and the log is longer than `maxPullLimit`.
        """
        async with self._lock:
            after_ms = -1 if self.checkpoint_ms is None else self.checkpoint_ms
            found = await (self._fetch_after(after_ms) if self._has_pulled else self._fetch_initial())
            new = [element for element in found if element.ts_ms > after_ms]
            taken = new
            if self._first is not None and not self._has_pulled:
                taken = new[max(len(new) - self._first, 0) :]
            if self._verify:
                taken = [element for element in taken if self._has_valid_proof(element)]
            if new:
                self.checkpoint_ms = new[-1].ts_ms
            self._has_pulled = True
            return taken

    def follow(
        self,
        *,
        collection: str | None = None,
        params: ParamSet | None = None,
        initial_s: float = 0.25,
        max_s: float = 2.0,
        on_disconnect: Callable[[Exception], None] = lambda _: None,
    ) -> AsyncGenerator[list[LogElement]]:
        """Yield the new elements of each pull that finds some, without an end.

        While elements come it pulls again at once, else when the server's change stream announces an append.
        Pass the log's `collection`, and the `params` of its path, to receive only these changes; otherwise
        the server sends all that the caller may read. The stream holds a connection during the iteration.

        Without a stream it polls after `initial_s`, doubling up to `max_s`. If the server is unreachable or
        busy it calls `on_disconnect` once with the error and keeps trying. An error of the first pull is
        raised, as is any other error.
        """
        return follow(
            self._client,
            WatchTarget(self.key, collection, params),
            self._fetch,
            lambda change: self.checkpoint_ms is None or change.timestamp_ms > self.checkpoint_ms,
            has_started=self._has_pulled,
            initial_s=initial_s,
            max_s=max_s,
            on_disconnect=on_disconnect,
            sleep=self._sleep,
        )

    async def _fetch(self) -> tuple[list[LogElement] | None, bool]:
        elements = await self.pull()
        return elements or None, self.has_more

    async def _fetch_initial(self) -> list[LogElement]:
        if self._first is not None:
            # Of none the place is wanted, which the newest element tells.
            return await self._request(since=self.checkpoint_ms, last=max(self._first, 1))
        if self.checkpoint_ms is not None:
            return await self._fetch_after(self.checkpoint_ms)
        return await self._request(full=True)

    async def _fetch_after(self, checkpoint_ms: int) -> list[LogElement]:
        """Return the elements after `checkpoint_ms`, or the oldest of them; perhaps earlier ones as well."""
        if checkpoint_ms < 0:
            # The log was empty. A checkpoint cannot ask for an element at time 0.
            with suppress(FullNotAllowed):
                return await self._request(full=True)
        try:
            found = await self._request(since=max(checkpoint_ms, 0))
        except CheckpointTooOld as error:
            if error.earliest_ms is not None:
                raise
            too_old = error
        else:
            if self.has_more and not any(element.ts_ms > checkpoint_ms for element in found):
                # The checkpoint was ignored (forceFullFetch): the same would come for ever.
                return await self._request(full=True)
            return found
        newest = await self._request(last=QUIET_FETCH_COUNT)
        if not newest or newest[0].ts_ms <= checkpoint_ms:
            return newest
        try:
            return await self._request(full=True)
        except FullNotAllowed:
            raise too_old from None

    async def _request(
        self, *, since: int | None = None, last: int | None = None, full: bool = False
    ) -> list[LogElement]:
        pulled = await self._client.pull(self.key, since=since, last=last, full=full)
        elements = pulled.elements(self._field)
        self.has_more = pulled.has_more
        return elements

    def _has_valid_proof(self, element: LogElement) -> bool:
        author, signature = (element.author_pubkey or "").lower(), element.author_signature or ""
        expected = self._authors is None or author in self._authors
        data = canonicalize(orjson.dumps(element.data))
        if expected and verify_author(APPEND_AUTHOR, document_key(self.key), data, author, signature):
            return True
        if self._skip:
            return False
        raise BadAuthorProof(element)
