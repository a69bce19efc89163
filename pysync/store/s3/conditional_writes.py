"""Conditional writes: who wins, and what became of a write whose answer was lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from pysync.errors import StoreUnavailable
from pysync.store.base import ANY, Etag, EtagMismatch, Expect, Object, check_expectation
from pysync.store.s3.cache import Recent
from pysync.store.s3.http import Answer, Broken, Call, Refused, Requests
from pysync.store.s3.versions import (
    LINEAGE,
    NOTHING,
    SHA256,
    TOMBSTONE,
    TOMBSTONE_TYPE,
    Base,
    Bucket,
    Lineage,
    Verdict,
    Version,
    decide,
    plain_etag,
)
from pysync.write_ids import marked, new_mark

_LOCKS: Final = 256


@dataclass(slots=True)
class Write:
    """One write of a document, tombstone or small file, however often it is tried. `sent` is the body as it
    is stored, `sha256` a file's."""

    id: str
    key: str
    body: bytes
    sent: bytes
    content_type: str
    modified_ms: int
    sha256: str | None = None

    def lineage(self, base: Base | None) -> Lineage:
        """What it names as replaced; nothing where it does not matter what it replaces (None)."""
        return Lineage(self.modified_ms, (self.id, *(base.replaced if base else ())))

    def call(self, base: Base | None, condition: Mapping[str, str]) -> Call:
        headers = {
            "Content-Type": self.content_type,
            LINEAGE: self.lineage(base).header(),
            **({} if self.sha256 is None else {SHA256: self.sha256}),
            **condition,
        }
        return Call("PUT", self.key, headers, self.sent)


class Writes:
    """The writes to one bucket of what is put whole. Where the bucket does not honour conditions, they hold
    within this object: whoever writes to a key waits for the others."""

    def __init__(self, requests: Requests, recent: Recent, bucket: Bucket, now_ms: Callable[[], int]) -> None:
        self._requests = requests
        self._recent = recent
        self._bucket = bucket
        self._now_ms = now_ms
        self._locks = [asyncio.Lock() for _ in range(_LOCKS)]

    async def put(self, key: str, body: bytes, content_type: str, expect: Expect) -> str:
        """As `Store.put`."""
        id_ = new_mark()
        write = Write(id_, key, body, marked(body, id_), content_type, self._now_ms())
        if not self._bucket.is_conditional:
            return await self._put_alone(write, expect)
        if expect == ANY:
            return await self._put_any(write)
        base = self._recent.base(key, expect.value) if isinstance(expect, Etag) else NOTHING
        return await self._swap(write, base)

    async def put_file(self, key: str, body: bytes, content_type: str, sha256: str) -> None:
        """Put a file over whatever is there, once: on the condition that this is still there, so that an
        attempt that comes late cannot bring the file back over what came after it."""
        write = Write(new_mark(), key, b"", body, content_type, self._now_ms(), sha256)
        if not self._bucket.is_conditional:
            async with self._lock(key):
                await self._put_any(write)
            return
        while True:
            found = await self.find(key)
            with contextlib.suppress(EtagMismatch):
                await self._swap(write, NOTHING if found is None else Base(found.etag, found.ids))
                return

    async def delete(self, key: str, expect: Expect) -> None:
        """As `Store.delete`."""
        if not self._bucket.is_conditional:
            await self._delete_alone(key, expect)
        elif expect == ANY:
            await self._delete_any(key)
        elif isinstance(expect, Etag) and self._bucket.deletes:
            await self._delete_version(key, expect.value)
        else:
            found = await self._present(key)
            if found is not None:
                check_expectation(expect, found.etag)
                await self._bury(key, found)
        self._recent.forget(key)

    @asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        """For a write without a condition: where conditions hold in this process only, the others wait."""
        if self._bucket.is_conditional:
            yield
        else:
            async with self._lock(key):
                yield

    async def find(self, key: str) -> Version | None:
        """What is stored at `key`, a tombstone too, without its body."""
        answer = await self._requests.send(Call("HEAD", key), 404)
        return None if answer.status == 404 else Version.of(answer.headers)

    async def _swap(self, write: Write, base: Base) -> str:
        """The etag of `write`, over `base` and nothing else. Raises EtagMismatch where something else is
        there, StoreUnavailable where it cannot be told whether it was stored."""
        attempts = self._requests.attempts()
        maybe_stored = False
        while True:
            trouble: Broken | Refused
            try:
                answer = await self._requests.once(write.call(base, self._condition(base)))
                if answer.status == 200 and "ETag" in answer.headers:
                    return self._stored(write, base, answer)
                if answer.is_mismatch and not maybe_stored:
                    tombstone = await self._tombstone_in_place_of(write.key, base)
                    if tombstone is not None:
                        base = tombstone
                        continue
                trouble = Refused(answer)
            except Broken as broken:
                trouble = broken
            maybe_stored = maybe_stored or trouble.may_have_acted
            if maybe_stored and (trouble.may_have_acted or trouble.is_mismatch):
                etag = await self._outcome(write, base, trouble)
                if etag is not None:
                    return etag
            elif not (trouble.is_passing or trouble.is_mismatch):
                raise StoreUnavailable from trouble
            if not await attempts.again():
                raise StoreUnavailable from trouble

    async def _tombstone_in_place_of(self, key: str, base: Base) -> Base | None:
        """After a refusal: the tombstone that stands where nothing was expected, None where the refused write
        is worth another try. Raises EtagMismatch where it is not."""
        if base.etag is not None:
            raise EtagMismatch
        found = await self.find(key)
        if found is None:
            return None
        if not found.is_tombstone:
            raise EtagMismatch
        return Base(found.etag, found.ids)

    async def _outcome(self, write: Write, base: Base, trouble: Broken | Refused) -> str | None:
        """The etag of `write` after `trouble`, None where it is to be tried again. Raises as `_swap`."""
        found = await self.find(write.key)
        verdict = decide(write.id, base, found)
        if verdict is Verdict.STORED:
            assert found is not None
            return self._keep(write, base, found.etag)
        if verdict is Verdict.REPLACED:
            return f"replaced-{write.id}"
        if verdict is Verdict.NOT_STORED:
            raise EtagMismatch
        if verdict is Verdict.UNKNOWN:
            raise StoreUnavailable from trouble
        return None

    async def _put_any(self, write: Write) -> str:
        return self._stored(write, None, await self._requests.send(write.call(None, {})))

    async def _put_alone(self, write: Write, expect: Expect) -> str:
        async with self._lock(write.key):
            if expect != ANY:
                found = await self._present(write.key)
                check_expectation(expect, found and found.etag)
            return await self._put_any(write)

    async def _delete_alone(self, key: str, expect: Expect) -> None:
        async with self._lock(key):
            found = await self._present(key)
            if found is not None:
                check_expectation(expect, found.etag)
                await self._delete_any(key)

    async def _delete_any(self, key: str) -> None:
        await self._requests.send(Call("DELETE", key), 204, 404)

    async def _delete_version(self, key: str, etag: str) -> None:
        condition = {"If-Match": self._bucket.condition(etag)}
        answer = await self._requests.send(Call("DELETE", key, condition), 204, 404, 412)
        if answer.status == 412 and await self._present(key) is not None:
            raise EtagMismatch

    async def _bury(self, key: str, found: Version) -> None:
        """Put a tombstone in the place of `found`, as that can be done on a condition."""
        write = Write(new_mark(), key, TOMBSTONE, TOMBSTONE, TOMBSTONE_TYPE, self._now_ms())
        await self._swap(write, Base(found.etag, found.ids))

    async def _present(self, key: str) -> Version | None:
        found = await self.find(key)
        return None if found is None or found.is_tombstone else found

    def _condition(self, base: Base) -> dict[str, str]:
        if base.etag is None:
            return {"If-None-Match": "*"}
        return {"If-Match": self._bucket.condition(base.etag)}

    def _stored(self, write: Write, base: Base | None, answer: Answer) -> str:
        return self._keep(write, base, plain_etag(answer.headers["ETag"]))

    def _keep(self, write: Write, base: Base | None, etag: str) -> str:
        """Remember what is now stored, unless it is a file; returns its etag."""
        if write.sha256 is not None:
            self._recent.forget(write.key)
            return etag
        found = Object(write.body, etag, write.content_type, write.modified_ms)
        self._recent.keep(write.key, found, write.lineage(base).ids)
        return etag

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks[hash(key) % _LOCKS]
