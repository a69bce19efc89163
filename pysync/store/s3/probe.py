"""The probe at start: can the bucket be used, and does its server keep S3's promises?"""

import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar
from urllib.parse import urlsplit

from pysync.config import S3Place
from pysync.errors import StoreUnavailable
from pysync.store.s3.credentials import Account, asking
from pysync.store.s3.http import Answer, Broken, Call, Refused, Requests
from pysync.store.s3.listing import PROBES
from pysync.store.s3.versions import Bucket, plain_etag
from pysync.write_ids import new_mark

T = TypeVar("T")

log = logging.getLogger(__name__)

TOO_SKEWED_MS: Final = 60_000
"""S3 refuses signatures that are a quarter of an hour off."""

_OTHER_ETAG: Final = "0" * 32
_REGION: Final = re.compile(rb"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
_NEEDED: Final = "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload"
_TEXTS: Final = {
    "NoSuchBucket": "there is no such bucket: create it, or correct store.url",
    "InvalidAccessKeyId": "the access key is not known there: correct store.accessKeyId or AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": (
        "the secret key is not that of the access key: correct store.secretAccessKey or AWS_SECRET_ACCESS_KEY"
    ),
    "ExpiredToken": "the credentials have expired: renew them",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "AccessDenied": f"the credentials do not allow what is needed: {_NEEDED}",
}


async def examine(account: Account, requests: Requests, place: S3Place, shared: bool) -> Bucket:
    """What the server of the bucket keeps, asked with objects that are removed again.

    Raises StoreUnavailable where the bucket cannot be used, ValueError where it is `shared` and cannot be;
    both say in a sentence what is to be done."""
    name = f"s3://{place.bucket} at {urlsplit(account.base).hostname}"
    try:
        bucket = await _Probe(requests, account.base).run()
    except (Broken, Refused) as error:
        raise StoreUnavailable(f"{name}: {_told(error)}") from error
    try:
        with asking():
            await account.client.list_objects_v2(Bucket=place.bucket, Prefix=requests.root, MaxKeys=1)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{name}: its keys cannot be listed: {error.__cause__}") from error
    _warn(bucket, name, shared)
    return bucket


class _Probe:
    """One run, on a key of its own. Raises Broken and Refused. A step whose outcome is lost is taken again,
    so none relies on what the one before it has left."""

    def __init__(self, requests: Requests, url: str) -> None:
        self._requests = requests
        self._url = url
        self._key = f"{PROBES}/{new_mark()}"
        self._puts = 0

    async def run(self) -> Bucket:
        first = await self._retried(self._put)
        if first.status != 200 or "ETag" not in first.headers:
            raise Refused(first)
        try:
            creates = await self._is_refused("If-None-Match", "*")
            quoted = await self._replaces('"')
            plain = not quoted and await self._replaces("")
            deletes = (quoted or plain) and await self._deletes('"' if quoted else "")
        finally:
            with contextlib.suppress(StoreUnavailable):
                await self._requests.send(Call("DELETE", self._key), 204, 404)
        return Bucket(
            url=self._url,
            creates=creates,
            replaces=quoted or plain,
            deletes=deletes,
            quotes=not plain,
            skew_ms=_skew_ms(first),
        )

    async def _replaces(self, quote: str) -> bool:
        """Whether `If-Match`, with etags in `quote`, lets pass the right one and nothing else."""

        async def is_passed() -> bool:
            etag = plain_etag((await self._put()).headers.get("ETag", ""))
            return (await self._put("If-Match", f"{quote}{etag}{quote}")).status == 200

        return await self._retried(is_passed) and await self._is_refused(
            "If-Match", f"{quote}{_OTHER_ETAG}{quote}"
        )

    async def _deletes(self, quote: str) -> bool:
        condition = {"If-Match": f"{quote}{_OTHER_ETAG}{quote}"}
        answer = await self._retried(lambda: self._ask(Call("DELETE", self._key, condition)))
        return answer.status == 412

    async def _is_refused(self, name: str, value: str) -> bool:
        return (await self._retried(lambda: self._put(name, value))).status == 412

    async def _put(self, name: str = "Content-Type", value: str = "text/plain") -> Answer:
        self._puts += 1
        headers = {"Content-Type": "text/plain", name: value}
        return await self._ask(Call("PUT", self._key, headers, b"%d\n" % self._puts))

    async def _ask(self, call: Call) -> Answer:
        answer = await self._requests.once(call)
        if answer.is_passing:
            raise Refused(answer)
        return answer

    async def _retried(self, step: Callable[[], Awaitable[T]]) -> T:
        attempts = self._requests.attempts()
        while True:
            try:
                return await step()
            except (Broken, Refused) as error:
                if not error.is_passing or not await attempts.again():
                    raise


def _warn(bucket: Bucket, name: str, shared: bool) -> None:
    if not bucket.is_conditional:
        ignored = " and ".join(bucket.ignored)
        if shared:
            raise ValueError(f"store: {name} ignores {ignored}: it cannot be served by more than one process")
        log.warning("%s ignores %s: no other process may serve it beside this one", name, ignored)
    if abs(bucket.skew_ms) > TOO_SKEWED_MS:
        log.warning("%s: %s", name, _skew_told(bucket.skew_ms))


def _told(error: Broken | Refused) -> str:
    """What went wrong, and what to do."""
    if isinstance(error, Broken):
        return f"it cannot be reached: {error}"
    answer = error.answer
    if answer.code == "RequestTimeTooSkewed":
        return _skew_told(_skew_ms(answer))
    region = answer.headers.get("x-amz-bucket-region") or _named_region(answer.body)
    if answer.status in (301, 307, 400) and region:
        return f"the bucket is in another region: set store.region to {region}"
    return _TEXTS.get(answer.code, str(error))


def _named_region(body: bytes) -> str:
    found = _REGION.search(body)
    return (found[1] or found[2]).decode() if found else ""


def _skew_ms(answer: Answer) -> int:
    said = answer.headers.get("Date")
    return 0 if said is None else round((time.time() - parsedate_to_datetime(said).timestamp()) * 1000)


def _skew_told(skew_ms: int) -> str:
    side = "ahead of" if skew_ms > 0 else "behind"
    return f"this machine's clock is {abs(skew_ms) // 1000} s {side} the server's: set it"
