"""Receiving what others write: from the feed of changes, and by comparing where no cursor helps."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from pysync.auth.certificates import Certificate
from pysync.client.log_cursor import LogCursor
from pysync.client.models import BatchEntry, LogElement, ParamSet, encode
from pysync.client.replica.file import TAIL_ELEMENTS, Edit, Followed, RemoteVersion, encode_error
from pysync.client.replica.outbox import SendingCopy
from pysync.client.sync import sorted_json
from pysync.client.watch import ChangesPage, is_retryable
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.config.key_templates import KeyTemplate
from pysync.errors import (
    BadRequest,
    CheckpointTooOld,
    Conflict,
    DocumentCorrupt,
    Forbidden,
    FullNotAllowed,
    HashesNotAvailable,
    MethodNotAllowed,
    NotFound,
    PullBoundRequired,
    PysyncError,
    UnknownCollection,
    UriTooLong,
)
from pysync.protocol import HASH_DIGITS, MAX_BATCH_ENTRIES

MAX_COMPARED: Final = 500
"""Documents that are compared and stored together."""
REMOVALS_MS: Final = 90 * 24 * 3600 * 1000
"""Time for which a replica knows what was removed. A server that was restored may need it."""

UNREADABLE: Final = (Forbidden, BadRequest, NotFound, MethodNotAllowed)
"""Errors of what the caller may not read, or what is not there. They concern one collection or key."""


class Announced(NamedTuple):
    """The entry of a feed or a list for a key. `hash` is `""` for a removal, and None if it is not known. It
    may be its first 16 digits. `written_ms` is 0 if it is not known."""

    key: str
    params: Mapping[str, str]
    hash: str | None = None
    written_ms: int = 0


class Received(NamedTuple):
    """A version that was fetched, and the new elements of a log: all that there are, if `is_gap`. If it is
    not `is_dated` the time of the version is that of the pull."""

    version: RemoteVersion
    elements: Sequence[LogElement] = ()
    is_gap: bool = False
    is_dated: bool = True


class ReceivingCopy(SendingCopy):
    """The versions of the server, and their way here.

    A param-set has its own cursor, which is stored in the transaction that has the effect of the page. A page
    says what changed, and batches fetch what is not known yet.

    After a reset everything is compared: with a list, else with the feed from its beginning. A document that
    they do not name is pulled as well, because the caller may just not see it any more: such a copy stays.
    """

    async def _receive(self) -> PysyncError | None:
        """Receive all changes. Return the error of a collection that the caller may not read; its copies
        stay. When it may be read again it begins anew, because its changes were not received meanwhile."""
        denied = None
        self._note_scope(self._client.certificate)
        self._feeds_left = self._file.feeds()
        while self._feeds_left:
            feed = self._feeds_left.pop(0)
            try:
                await self._follow(feed)
            except UNREADABLE as error:
                denied = error
                with self._file.transaction():
                    self._file.move(feed, "")
        return denied

    def _note_scope(self, certificate: Certificate | None) -> None:
        """Begin everything anew if the certificate allows something else than the last one."""
        if certificate is None:
            return
        scope = repr((sorted(certificate.ops), certificate.collections, certificate.paths))
        if scope != (known := self._file.setting("scope")):
            with self._file.transaction():
                self._file.set("scope", scope)
                for feed in self._file.feeds() if known else ():
                    self._file.move(feed, "")

    def _follow_only(self, collections: Mapping[str, Sequence[ParamSet]]) -> None:
        """Follow these param-sets. Copies that belong to others are forgotten, but not edits that wait."""
        known = self._file.feeds()
        wanted = [
            Followed(name, {param: str(value) for param, value in params.items()})
            for name, sets in collections.items()
            for params in sets
        ]
        dropped = [feed for feed in known if feed._replace(cursor="") not in wanted]
        with self._file.transaction():
            for feed in dropped:
                self._file.unfollow(feed)
            for feed in wanted:
                self._file.move(feed, next((each.cursor for each in known if each[:2] == feed[:2]), ""))
            if dropped:
                keys = list(self._file.stored_keys(""))
                self._file.forget(key for key in keys if not any(self._covers(feed, key) for feed in wanted))
            self._file.forget_removals(self._now_ms() - REMOVALS_MS)

    async def _follow(self, feed: Followed) -> None:
        if feed.collection not in self._paths:
            # Others in the answer could take keys from a collection that is sealed.
            if (path := (await self._client.key_templates([feed.collection])).get(feed.collection)) is None:
                raise UnknownCollection
            self._paths[feed.collection] = path
            with self._file.transaction():
                self._file.set("paths", encode(self._paths).decode())
        begins_anew = not feed.cursor and any(self._stored_keys(feed))
        async for page in self._pages(feed, feed.cursor):
            if page.is_reset or begins_anew:
                return await self._compare(feed, page)
            await self._apply_entries(feed, _entries(page, self._paths[feed.collection]), page.cursor)
        return None

    def _pages(self, feed: Followed, cursor: str = "") -> AsyncIterator[ChangesPage]:
        return self._client.change_pages(cursor or None, [feed.collection], {feed.collection: feed.params})

    async def _compare(self, feed: Followed, page: ChangesPage) -> None:
        """Compare everything with the server. `page` is the reset, or else the first page of a feed that
        begins anew. What changes meanwhile comes with the next page."""
        cursor = (
            page.cursor if page.is_reset else (await self._client.changes("now", [feed.collection])).cursor
        )
        seen = set[str]()
        async for entries in self._survey(feed, page.is_reset and page.restored_ms is None):
            seen.update(entry.key for entry in entries)
            await self._apply_entries(feed, entries, restored_ms=page.restored_ms)
        path = KeyTemplate.of(self._paths[feed.collection])
        rest = list(self._stored_keys(feed, seen))
        for at in range(0, len(rest), MAX_COMPARED):
            entries = [Announced(key, path.params_of(key)) for key in rest[at : at + MAX_COMPARED]]
            await self._apply_entries(feed, entries, restored_ms=page.restored_ms)
        with self._file.transaction():
            self._file.move(feed, cursor)

    async def _survey(self, feed: Followed, prefers_list: bool) -> AsyncIterator[list[Announced]]:
        """Yield what the server has, from a list or from the feed, of which only the feed has times. In a
        bucket whose collection is not listable neither is possible, and nothing comes."""
        ways = [self._from_list, self._from_feed]
        for way in ways if prefers_list else reversed(ways):
            with suppress(*UNREADABLE):
                async for entries in way(feed):
                    yield entries
                return

    async def _from_list(self, feed: Followed) -> AsyncIterator[list[Announced]]:
        path = KeyTemplate.of(self._paths[feed.collection])
        if not path.ends_in_param or set(path.params) - feed.params.keys() != {path.params[-1]}:
            raise NotFound
        entries = list[Announced]()
        async for name, hash_ in self._names("/".join(path.segments[:-1]).format_map(feed.params)):
            params = {**feed.params, path.params[-1]: name}
            entries.append(Announced(path.fill(params), params, hash_))
            if len(entries) == MAX_COMPARED:
                yield entries
                entries = []
        yield entries

    async def _from_feed(self, feed: Followed) -> AsyncIterator[list[Announced]]:
        async for page in self._pages(feed):
            if page.is_reset:
                raise NotFound
            yield _entries(page, self._paths[feed.collection])

    async def _names(self, prefix: str) -> AsyncIterator[tuple[str, str | None]]:
        """Yield the names of a list, with the digits of their hashes where the server has them."""
        try:
            async for each in self._client.list_hashes(prefix):
                yield each
        except HashesNotAvailable:
            async for name in self._client.list(prefix):
                yield name, None

    async def _apply_entries(
        self,
        feed: Followed,
        entries: Sequence[Announced],
        cursor: str | None = None,
        restored_ms: int | None = None,
    ) -> None:
        """Fetch what is new of the entries, and store it together with the cursor. After a restore, what is
        known here of later times is sent back."""
        await asyncio.sleep(0)  # a list may have many that are known
        news = [entry for entry in entries if self._is_new(entry)]
        removed = [entry for entry in news if entry.hash == ""]
        wanted = [entry for entry in news if entry.hash != ""]
        batches = [wanted[at : at + MAX_BATCH_ENTRIES] for at in range(0, len(wanted), MAX_BATCH_ENTRIES)]

        async def fetch(batch: Sequence[Announced]) -> list[Received]:
            return await self._fetch(feed.collection, batch, compares=cursor is None)

        fetched = [each for found in await gather_bounded(CONCURRENT, batches, fetch) for each in found]
        fetched += [Received(RemoteVersion(each.key, "", None, each.written_ms)) for each in removed]
        with self._file.transaction():
            for received in fetched:
                version, elements, is_gap, _ = received
                before = self._file.version(version.key)
                if restored_ms is None or not self._send_back(before, received, restored_ms):
                    self._apply_remote(version)
                if is_gap:
                    self._file.forget_elements(version.key)
                self._file.add_elements(version.key, elements)
                if cursor is None:
                    self._begin_space(version.key, before)
            if cursor is not None:
                self._file.move(feed, cursor)
                for entry in entries:
                    self._begin_space(entry.key)
        for each in fetched:
            self._notify(each.version.key)

    def _is_new(self, entry: Announced) -> bool:
        version = self._file.version(entry.key)
        if version is None or entry.hash is None:
            return entry.hash != ""
        return version.hash[:HASH_DIGITS] != entry.hash[:HASH_DIGITS]

    async def _fetch(
        self, collection: str, entries: Sequence[Announced], *, compares: bool
    ) -> list[Received]:
        """Return what is stored of the entries, without what the caller may not read and what it has."""
        found: Sequence[BatchEntry | None]
        try:
            versions = [self._file.version(entry.key) for entry in entries]
            found = await self._client.batch_pull_many(
                collection, [entry.params for entry in entries], [each and each.hash for each in versions]
            )
        except (BadRequest, UriTooLong):  # too many, or one that no batch may have
            if len(entries) > 1:
                middle = len(entries) // 2
                halves = entries[:middle], entries[middle:]
                return [
                    each for half in halves for each in await self._fetch(collection, half, compares=compares)
                ]
            found = [await self._pull(entries[0])]
        received = []
        for entry, each in zip(entries, found, strict=True):
            if isinstance(each, PullBoundRequired):
                with suppress(*UNREADABLE):
                    received.append(await self._fetch_log(entry, compares=compares))
            elif isinstance(each, NotFound):  # files are not in batches
                if entry.hash is not None:
                    received.append(Received(RemoteVersion(entry.key, entry.hash, None, entry.written_ms)))
                elif not isinstance(pulled := await self._pull(entry), PysyncError | None):
                    received.append(
                        Received(RemoteVersion(entry.key, pulled.hash, None, pulled.timestamp_ms))
                    )
            elif isinstance(each, PysyncError):
                if is_retryable(each) and not isinstance(each, DocumentCorrupt):
                    raise each
            elif each is not None and not each.unchanged:
                data = encode(each.data) if each.hash else None
                written_ms = entry.written_ms or each.timestamp_ms
                version = RemoteVersion(entry.key, each.hash, data, written_ms)
                received.append(Received(version, is_dated=entry.written_ms > 0))
        return received

    async def _pull(self, entry: Announced) -> BatchEntry | None:
        """Return what a batch would have; None for a file."""
        try:
            return await self._client.pull(entry.key)
        except ValueError:
            return None
        except PysyncError as error:
            return error

    async def _fetch_log(self, entry: Announced, *, compares: bool) -> Received:
        """Return the elements after the checkpoint; the newest of a log that is new here, or is compared: it
        may have lost elements, and got others in their place."""
        key, hash_ = entry.key, entry.hash
        version = self._file.version(key) or RemoteVersion(key, "")
        if hash_ is None and not (hash_ := (await self._client.pull(key, last=0)).hash):
            return Received(RemoteVersion(key, "", None, self._now_ms()))
        elements: list[LogElement] = []
        cursor = LogCursor(self._client, key, field=None, since=version.checkpoint_ms)
        if is_gap := compares or version.checkpoint_ms is None:
            cursor = LogCursor(self._client, key, field=None, first=TAIL_ELEMENTS)
        try:
            while not elements or cursor.has_more:
                pulled = await cursor.pull()
                elements = (elements + pulled)[-TAIL_ELEMENTS:]
                if not pulled:
                    break
        except (CheckpointTooOld, FullNotAllowed):
            is_gap, cursor = True, LogCursor(self._client, key, field=None, first=TAIL_ELEMENTS)
            elements = await cursor.pull()
        return Received(
            RemoteVersion(key, hash_, None, entry.written_ms, cursor.checkpoint_ms), elements, is_gap
        )

    def _send_back(self, mine: RemoteVersion | None, received: Received, restored_ms: int) -> bool:
        """Have a restored server get what was received after that moment, if it has an earlier version. If
        nobody knows the time of its version, the application decides. In a transaction."""
        theirs = received.version
        waiting = self._file.edit(theirs.key)
        is_unclear = theirs.hash != "" and not received.is_dated
        is_earlier = not theirs.hash or theirs.written_ms <= restored_ms or is_unclear
        if mine is None or mine.written_ms <= restored_ms or not is_earlier or (mine.hash and not mine.data):
            return False
        try:
            data = None if mine.data is None else sorted_json(self._open(mine.key, mine.data))
        except Exception:  # of a cipher: what cannot be opened cannot be sealed again
            return False
        self._file.store(theirs)
        edit = Edit(None, mine.key, "put" if mine.data else "delete", data, written_ms=mine.written_ms)
        edit = (waiting or edit).unsent(base=theirs.data, base_hash=theirs.hash)
        if edit.data is not None or theirs.hash:
            error = encode_error(Conflict(theirs.hash)) if is_unclear else None
            self._file.save(replace(edit, error=error))
        return True

    def _begin_space(self, key: str, before: RemoteVersion | None = None) -> None:
        """Begin the collections of a space anew if the access document at `key` gives the caller a role that
        `before` did not: what was there already was not announced. Without `before` any role counts, because
        the caller does not see the versions in which it had none. In a transaction."""
        version = self._file.version(key)
        collection = self._collection_of(key) or ""
        path = KeyTemplate.of(self._paths.get(collection, ""))
        if version is None or path.ends_in_param or not path.params:
            return
        if self._roles(version.data) <= self._roles(before and before.data):
            return
        space = path.params_of(key)
        for feed in self._file.feeds():
            names = KeyTemplate.of(self._paths.get(feed.collection, "")).params
            is_of_space = feed.collection != collection and space.keys() <= set(names)
            if is_of_space and all(feed.params.get(name, value) == value for name, value in space.items()):
                self._file.move(feed, "")
                left = [each for each in self._feeds_left if each[:2] != feed[:2]]
                self._feeds_left = [*left, feed._replace(cursor="")]

    def _roles(self, data: bytes | None) -> set[str]:
        """Return what an access document makes of the caller; nothing for another document."""
        if data is None or b'"owner"' not in data:
            return set()
        found: dict[str, Any] = orjson.loads(data)
        members, identity = found.get("members"), self._client.identity
        owner = {"owner", "member"} if identity and found.get("owner") == identity else set()
        return owner | ({"member"} if isinstance(members, list) and identity in members else set())

    def _covers(self, feed: Followed, key: str) -> bool:
        """Return True if the document at `key` belongs to the feed."""
        if self._collection_of(key) != feed.collection:
            return False
        return feed.params.items() <= KeyTemplate.of(self._paths[feed.collection]).params_of(key).items()

    def _stored_keys(self, feed: Followed, but: Collection[str] = ()) -> Iterator[str]:
        """Yield the keys of a feed at which the server has something, but not those in `but`."""
        path = self._paths.get(feed.collection, "")
        values = dict.fromkeys(KeyTemplate.of(path).params, "\0") | feed.params
        keys = self._file.stored_keys(path.format_map(values).partition("\0")[0])
        return (key for key in keys if key not in but and self._covers(feed, key))


def _entries(page: ChangesPage, path: str) -> list[Announced]:
    """Return the entries of a page of a collection with this template of keys."""
    return [
        Announced(
            KeyTemplate.of(path).fill(each.params),
            each.params,
            each.hash if each.hash or each.removed else None,  # it has none while it is damaged
            each.timestamp_ms,
        )
        for each in page.changes
    ]
