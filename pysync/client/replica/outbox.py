"""Sending the edits of a replica: in order for each key, and once, whatever ends between two steps."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import orjson

from pysync._core import decode_push
from pysync.client.client import Client
from pysync.client.log_cursor import LogCursor
from pysync.client.merge import MISSING, Dropped, same
from pysync.client.models import LogElement, encode
from pysync.client.replica.file import Edit, RemoteVersion, encode_error
from pysync.client.replica.local import CollectionRules, LocalCopy
from pysync.client.sync import sorted_json
from pysync.client.watch import is_retryable
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.errors import (
    BadRequest,
    Conflict,
    Erased,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    OutcomeUnknown,
    PysyncError,
    QuotaExceeded,
    RateLimited,
    Unauthorized,
    Unavailable,
)

KEYS_TRUSTED_MS: Final = 5 * 60_000
"""Age up to which an append without an answer is repeated under its idempotency key. The server remembers it
for ten minutes, and the clock may have been corrected meanwhile by the 300 s that signatures allow."""


UNKNOWN_HASH: Final = "-"
"""The hash of a log that has been appended to but not read. No log has it."""


class SendingCopy(LocalCopy):
    """The edits that wait, and their way to the server.

    A push has its idempotency key, its base and its bytes in the file before the first attempt. After a crash
    it is sent as it was. The next edit of the document waits until its outcome is known: the answer, or a
    version of the server that is the one that was sent, or one that excludes it.
    """

    def __init__(self, client: Client, rules: CollectionRules, now_ms: Callable[[], int]) -> None:
        super().__init__(rules, now_ms)
        self._client = client

    async def _send(self) -> None:
        """Send all edits that wait, those of different keys concurrently. A key that meets an error which may
        go away does not stop the others, unless the server has no time or rejects all; raises the first such
        error."""
        errors: list[PysyncError] = []

        async def send(key: str) -> None:
            try:
                while edit := self._file.first_edit(key):
                    await self._send_one(edit)
            except (Unauthorized, Unavailable, RateLimited):
                raise
            except PysyncError as error:
                errors.append(error)

        await gather_bounded(CONCURRENT, self._file.edited_keys(), send)
        if errors:
            raise errors[0]

    async def _send_one(self, edit: Edit) -> None:
        """Bring the edit one step further: it is prepared, sent, merged with another version, or rejected."""
        if not edit.idempotency_key:
            try:
                self._prepare(edit)
            except OSError:
                raise
            except Exception as error:  # of a cipher, or of data that no server accepts
                self._reject(edit, error)
            return
        try:
            await (self._append(edit) if edit.kind == "append" else self._push(edit))
        except (Unauthorized, Conflict):
            raise
        except (PysyncError, ValueError) as error:  # a ValueError of a key where a file is
            is_passing = isinstance(error, PysyncError) and is_retryable(error)
            if is_passing and not isinstance(error, QuotaExceeded):
                raise
            self._reject(edit, error)

    def _prepare(self, edit: Edit) -> None:
        """Write down what will be sent, unless the server has it."""
        sent, sent_hash = None, ""
        if edit.data is not None:
            if edit.base is not None and sorted_json(self._open(edit.key, edit.base)) == edit.data:
                with self._file.transaction():
                    self._file.drop(edit)
                return
            sent = encode(self._rules_of(edit.key).seal(orjson.loads(edit.data)))
            sent_hash = decode_push(b'{"data":' + sent + b"}").hash
        version, newest = self._file.version(edit.key), self._file.elements(edit.key, 1)
        known = [version and version.checkpoint_ms, *(element.ts_ms for element in newest)]
        edit = replace(
            edit,
            sent=sent,
            sent_hash=sent_hash,
            idempotency_key=secrets.token_hex(16),
            sent_ms=self._now_ms(),
            checkpoint_ms=max(filter(None, known), default=0),
        )
        with self._file.transaction():
            self._file.save(edit)

    async def _push(self, edit: Edit) -> None:
        try:
            if edit.sent is None:
                stored = await self._client.delete(
                    edit.key, edit.base_hash, idempotency_key=edit.idempotency_key
                )
            else:
                stored = await self._client.push(
                    edit.key,
                    orjson.loads(edit.sent),
                    edit.base_hash or None,
                    idempotency_key=edit.idempotency_key,
                    written_ms=edit.written_ms,
                )
            version = RemoteVersion(edit.key, stored.hash, edit.sent, stored.timestamp_ms)
        except Conflict as conflict:
            if conflict.current_hash != edit.sent_hash:
                await self._resolve(edit.key, conflict)
                return
            version = RemoteVersion(edit.key, conflict.current_hash, edit.sent, self._now_ms())
        with self._file.transaction():
            self._file.store(version)
            self._settle(edit.key, version)

    async def _resolve(self, key: str, conflict: Conflict) -> None:
        """Merge the edit with the version that the server has in place of its base."""
        edit = self._file.edit(key)  # as it is now: it may be another than the one that was sent
        if edit is None:
            return
        is_deletion = edit.data is None and edit.sent is None
        is_known = edit.base_hash not in ("", UNKNOWN_HASH)
        if is_deletion and (not is_known or conflict.current_hash.startswith(edit.base_hash)):
            with self._file.transaction():  # of something that was never read, so there is nothing to merge
                self._file.save(edit.unsent(base_hash=conflict.current_hash))
            return
        # Others go on with a log or a file, or a server that was restored has got something newer.
        if (is_deletion and edit.base is None) or edit.written_ms is not None:
            with self._file.transaction():
                if edit.written_ms is None:
                    self._drop_deletion(edit)
                else:
                    self._file.drop(edit)
            return
        pulled = await self._client.pull(edit.key)
        if pulled.hash == edit.base_hash:
            raise conflict
        data = encode(pulled.data) if pulled.hash else None
        with self._file.transaction():
            self._apply_remote(RemoteVersion(edit.key, pulled.hash, data, pulled.timestamp_ms))
        self._notify(edit.key)

    async def _append(self, edit: Edit) -> None:
        if not 0 <= self._now_ms() - edit.sent_ms < KEYS_TRUSTED_MS:
            if (found := await self._find(edit)) is not None:
                return self._accept(edit, found)
            # An attempt that has not arrived by now never does: this one counts as the first.
            edit = replace(edit, sent_ms=self._now_ms())
            with self._file.transaction():
                self._file.save(edit)
        data = orjson.loads(edit.sent or b"{}")
        appended = await self._client.append(edit.key, data, idempotency_key=edit.idempotency_key)
        return self._accept(edit, LogElement(appended.timestamp_ms, data, self._client.author))

    async def _find(self, edit: Edit) -> LogElement | None:
        """Return the element of the log that this append has made. Only the first of a log is ever on its
        way, and those that the log accepted before it are not after its checkpoint, so none is matched twice.
        Raises OutcomeUnknown if the log cannot be read from there."""
        data = orjson.loads(edit.sent or b"{}")
        cursor = LogCursor(self._client, edit.key, field=None, since=edit.checkpoint_ms)
        try:
            while True:
                for element in await cursor.pull():
                    if element.author_pubkey == self._client.author and same(element.data, data):
                        return element
                if not cursor.has_more:
                    return None
        except (BadRequest, Forbidden, NotFound, Unauthorized) as error:
            if isinstance(error, Unauthorized) and self._client.identity:
                raise
            raise OutcomeUnknown from error

    def _accept(self, edit: Edit, element: LogElement) -> None:
        """The element is in the log. Its checkpoint stays, since others may have appended before it."""
        with self._file.transaction():
            self._file.drop(edit)
            if self._file.version(edit.key) is None:
                self._file.store(RemoteVersion(edit.key, UNKNOWN_HASH, None, element.ts_ms))
            self._file.add_elements(edit.key, [element])
        self._notify(edit.key)

    def _reject(self, edit: Edit, error: Exception) -> None:
        """Move the edit to those that were rejected. If it has been replaced while it was on its way, send
        the newer one instead. The copy is the version of the server again."""
        current = edit if edit.kind == "append" else self._file.edit(edit.key)
        if current is None:
            return
        is_mine = edit.kind == "append" or current.written_ms is None
        if not is_mine and isinstance(error, Erased | Forbidden | NotFound | MethodNotAllowed):
            with self._file.transaction():
                self._file.drop(current)  # somebody else's, who may send it back
        else:
            is_newer = edit.kind != "append" and self._is_newer(current)
            with self._file.transaction():
                self._file.save(current.unsent(error=None if is_newer else encode_error(error)))
        self._notify(edit.key)

    def _is_newer(self, edit: Edit) -> bool:
        """Return True if something is on its way, and the edit is not that any more."""
        try:
            sent = None if edit.sent is None else sorted_json(self._open(edit.key, edit.sent))
        except Exception:  # of any cipher
            return True
        return edit.idempotency_key != "" and sent != edit.data

    def _apply_remote(self, version: RemoteVersion) -> None:
        """Store a version of the server, and bring the edit that waits onto it. In a transaction."""
        self._file.store(version)
        edit = self._file.edit(version.key)
        if edit is None or edit.base_hash == version.hash:
            return None
        if edit.idempotency_key and edit.sent_hash == version.hash:
            return self._settle(edit.key, version)
        if edit.data is None and not edit.base_hash and edit.sent is None:  # a deletion of what was not known
            return self._file.save(edit.unsent(base=version.data, base_hash=version.hash))
        if edit.data is None:  # an edit wins over a deletion
            return self._drop_deletion(edit)
        try:
            base, theirs = self._open(edit.key, edit.base), self._open(edit.key, version.data)
            merged, dropped = self._rules_of(edit.key).merge(base, orjson.loads(edit.data), theirs)
            text = sorted_json(merged)
        except Exception as error:  # of a cipher, or of a rule of the application
            return self._file.save(edit.unsent(error=encode_error(error)))
        self.dropped += ((edit.key, each) for each in dropped)
        if version.hash and text == sorted_json(theirs):
            return self._file.drop(edit)
        return self._file.save(edit.unsent(data=text, base=version.data, base_hash=version.hash))

    def _drop_deletion(self, edit: Edit) -> None:
        """Drop a deletion over which the edit of somebody else wins. In a transaction."""
        self._file.drop(edit)
        self.dropped.append((edit.key, Dropped((), MISSING, local=True)))

    def _settle(self, key: str, version: RemoteVersion) -> None:
        """The server has what was on its way: what was edited since is an edit of that. In a transaction."""
        edit = self._file.edit(key)
        if edit is not None and self._is_newer(edit):
            self._file.save(edit.unsent(base=edit.sent, base_hash=version.hash))
        elif edit is not None:
            self._file.drop(edit)
