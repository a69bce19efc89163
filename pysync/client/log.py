"""A log followed: what was appended since the last look, each element once (clients-and-crypto 6.4)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple

import orjson

from pysync._core import canonicalize, content_hash, verify_author
from pysync.client.client import Client, document_key
from pysync.client.connection import Unreachable, retry_after_s
from pysync.client.results import LogElement
from pysync.client.tails import ParamSet, TailRequest
from pysync.errors import CheckpointTooOld, FullNotAllowed, PysyncError, RateLimited, Unavailable
from pysync.signing import APPEND_AUTHOR

FIRST_LOOK_BACK = 100
"""How many of the newest elements are asked for where a checkpoint does not say enough; then ten times so
many."""


class LogGap(Exception):
    """Elements lie between the cursor and the newest ones that the server gives, out of the cursor's reach.
    Nothing was taken in. A new cursor begins where the caller says: `first` takes the newest."""


class BadAuthorProof(ValueError):
    """An element that was pulled (`element`) is not signed, or not by an author who was expected, or its
    signature is not over these data in this log."""

    def __init__(self, element: LogElement) -> None:
        super().__init__(f"the author proof of the element at {element.ts_ms} does not hold")
        self.element = element


class LogCursor:
    """A place in the log at `key`: each `pull` gives what was appended after it and moves it on.

    No element is left out, and none comes twice. A single pull does not promise that: it gives the newest
    `maxPullLimit` elements and keeps quiet about older ones. So a cursor asks from just before its place: an
    answer that holds the element there, or all that the log has by the log's hash, lacks nothing. When it
    does lack some, the cursor reads them page by page from the oldest on, where it knows the log's
    `collection` and `params` there (batch pulls), else it looks further back, as far as the server lets it,
    and asks for the whole log; it raises LogGap where the server gives neither. A log that expired and began
    anew goes on after the place, as times do.

    The elements are the caller's: the cursor keeps none. Pulls of several tasks wait for each other.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        *,
        field: str = "items",
        first: int | None = None,
        since: int | None = None,
        known: Iterable[LogElement] = (),
        verify: bool = False,
        authors: Iterable[str] | None = None,
        skip_bad_proofs: bool = False,
        collection: str | None = None,
        params: ParamSet | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """The first pull takes all of the log, which a server may refuse (FullNotAllowed), or the newest
        `first` elements, 0 for none. To go on from an earlier cursor, give its `checkpoint_ms` as `since`, or
        the elements that are `known` already: it begins after them.

        `verify` checks every author proof; `authors` are the public keys that alone may have written. Where
        one does not hold, a pull raises BadAuthorProof and takes in nothing, or with `skip_bad_proofs` leaves
        the element out. A proof covers the data and the log, not the time: for that, and for nothing being
        held back, the server is trusted.

        Raises ValueError for bounds that are none, and for a `since` below what is known.
        """
        newest = max((element.ts_ms for element in known), default=None)
        if since is not None and since < (newest or 0):
            raise ValueError("since must not be negative, nor before an element that is known")
        if first is not None and first < 0:
            raise ValueError("first must not be negative")
        self.key = key
        self._client = client
        self._field = field
        self._first = first
        self._place = newest if since is None else since
        self._pulled = False
        self._authors = None if authors is None else frozenset(author.lower() for author in authors)
        self._verify = verify or authors is not None
        self._skip = skip_bad_proofs
        self._collection = collection
        self._params = params or {}
        self._sleep = sleep
        self._turn = asyncio.Lock()

    @property
    def checkpoint_ms(self) -> int | None:
        """The time of the newest element that was taken in (or skipped); None before there is one. A cursor
        with this `since` goes on from here."""
        return self._place

    async def pull(self) -> list[LogElement]:
        """What is new, in the log's order. Raises what `Client.pull` does, LogGap and BadAuthorProof; the
        cursor then stays where it was."""
        async with self._turn:
            place = -1 if self._place is None else self._place
            found = await (self._newer(place) if self._pulled else self._first_look())
            new = [element for element in found if element.ts_ms > place]
            if self._first is not None and not self._pulled:
                taken = new[max(len(new) - self._first, 0) :]
            else:
                taken = new
            if self._verify:
                taken = [element for element in taken if self._holds(element)]
            if new:
                self._place = new[-1].ts_ms
            self._pulled = True
            return taken

    async def follow(
        self,
        *,
        first_s: float = 0.25,
        most_s: float = 2.0,
        lost: Callable[[Exception], None] = lambda _: None,
    ) -> AsyncIterator[list[LogElement]]:
        """What each pull that finds something gives, without end. Between pulls it waits for `first_s`,
        doubling up to `most_s` while nothing comes. When the server is out of reach or busy it tells `lost`,
        once, of what failed and goes on asking; of the first pull this is raised, as any other error is."""
        wait_s, failed = first_s, False
        while True:
            found: list[LogElement] = []
            asked_s = 0.0
            try:
                found = await self.pull()
                failed = False
            except (Unreachable, RateLimited, Unavailable) as error:
                if not self._pulled:
                    raise
                if not failed:
                    lost(error)
                failed, asked_s = True, retry_after_s(error)
            if found:
                yield found
                wait_s = first_s
            await self._sleep(max(wait_s, asked_s))
            wait_s = min(wait_s * 2, most_s)

    async def _first_look(self) -> list[LogElement]:
        if self._first is not None:
            # Of none the place is wanted, which the newest element tells.
            return (await self._ask(since=self._place, last=max(self._first, 1))).elements
        if self._place is not None:
            return await self._newer(self._place)
        return (await self._ask(full=True)).elements

    async def _newer(self, place: int) -> list[LogElement]:
        """All elements after `place`, and perhaps some before."""
        known = 0
        if place > 0:
            try:
                answer = await self._ask(since=place - 1)
            except CheckpointTooOld:
                pass  # also of a log that is merely quiet
            else:
                if answer.lacks_nothing(place):
                    return answer.elements
                if self._collection is not None and answer.elements:
                    return await self._pages(self._collection, place, answer.elements[-1].ts_ms)
                known = len(answer.elements)
        return await self._look_back(place, known + FIRST_LOOK_BACK)

    async def _pages(self, collection: str, place: int, newest: int) -> list[LogElement]:
        found: list[LogElement] = []
        while place < newest:
            request = TailRequest(self._params, since=place)
            (page,) = await self._client.batch_pull_many_append(collection, [request], field=self._field)
            if isinstance(page, PysyncError):
                raise page
            if not page:
                break  # expired meanwhile
            found += page
            place = page[-1].ts_ms
        return found

    async def _look_back(self, place: int, count: int) -> list[LogElement]:
        while True:
            answer = await self._ask(last=count)
            if answer.lacks_nothing(place):
                return answer.elements
            if len(answer.elements) < count:
                break
            count *= 10
        # The server gives no more at once; or hides members, so that the hash of its log tells nothing.
        try:
            return (await self._ask(full=True)).elements
        except FullNotAllowed as error:
            raise LogGap(f"{self.key}: the server no longer gives all elements after {place}") from error

    async def _ask(
        self, *, since: int | None = None, last: int | None = None, full: bool = False
    ) -> "_Answer":
        pulled = await self._client.pull(self.key, since=since, last=last, full=full)
        return _Answer(pulled.elements(self._field), pulled.hash)

    def _holds(self, element: LogElement) -> bool:
        author, signature = (element.author_pubkey or "").lower(), element.author_signature or ""
        expected = self._authors is None or author in self._authors
        data = canonicalize(orjson.dumps(element.data))
        if expected and verify_author(APPEND_AUTHOR, document_key(self.key), data, author, signature):
            return True
        if self._skip:
            return False
        raise BadAuthorProof(element)


class _Answer(NamedTuple):
    """What one pull gave: the newest elements of what was asked for, and the hash of the log."""

    elements: list[LogElement]
    hash: str

    def lacks_nothing(self, place: int) -> bool:
        """Whether these are sure to be all elements after `place`: they go back to it, or are all there
        are."""
        if not self.hash or not self.elements:
            return not self.hash
        if self.elements[0].ts_ms <= place:
            return True
        log = {"n": len(self.elements), "last": self.elements[-1].data}
        return content_hash(orjson.dumps(log)) == self.hash
