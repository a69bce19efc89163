"""The probe at start: can the bucket be used, and does its server keep S3's promises?"""

import contextlib
import logging
import re
import time
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

from pysync.config import S3Place
from pysync.errors import StoreUnavailable
from pysync.store.s3.account import Account, asking
from pysync.store.s3.bucket import Bucket
from pysync.store.s3.listing import PROBES
from pysync.store.s3.requests import Answer, Broken, Call, Refused, Requests
from pysync.store.s3.versions import new_id, plain_etag

log = logging.getLogger(__name__)

TOO_SKEWED_MS: Final = 60_000
"""S3 refuses signatures that are a quarter of an hour off."""

_OTHER_ETAG: Final = "0" * 32
_REGION: Final = re.compile(rb"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
_NEEDED: Final = "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload"
_TEXTS: Final = {
    "NoSuchBucket": "there is no such bucket: create it, or correct store.url",
    "InvalidAccessKeyId": "the access key is not known there: correct store.accessKeyId",
    "SignatureDoesNotMatch": "the secret key is not that of the access key: correct store.secretAccessKey",
    "ExpiredToken": "the credentials have expired: renew them",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "AccessDenied": f"the credentials do not allow what is needed: {_NEEDED}",
}


async def examine(account: Account, requests: Requests, place: S3Place, shared: bool) -> Bucket:
    """What the server of the bucket keeps, asked with objects that are removed again.

    Raises StoreUnavailable where the bucket cannot be used, ValueError where it is `shared` and cannot be;
    both say in a sentence what is to be done."""
    name = f"s3://{place.bucket} at {urlsplit(account.base).hostname}"
    attempts = requests.attempts()
    while True:
        try:
            bucket = await _Probe(requests, account.base).run()
            with asking():
                await account.client.list_objects_v2(Bucket=place.bucket, Prefix=requests.root, MaxKeys=1)
        except (Broken, Refused) as error:
            if not error.is_passing or not await attempts.again():
                raise StoreUnavailable(f"{name}: {_told(error)}") from error
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{name}: its keys cannot be listed: {error.__cause__}") from error
        else:
            _warn(bucket, name, shared)
            return bucket


class _Probe:
    """One run, on a key of its own. Raises Broken and Refused; where they are passing another run may do."""

    def __init__(self, requests: Requests, url: str) -> None:
        self._requests = requests
        self._url = url
        self._key = f"{PROBES}/{new_id()}"
        self._puts = 0

    async def run(self) -> Bucket:
        try:
            first = await self._put({})
            if first.status != 200 or "ETag" not in first.headers:
                raise Refused(first)
            creates = await self._is_refused({"If-None-Match": "*"})
            replaces, quotes = await self._replaces(), True
            if not replaces:
                quotes = False
                replaces = await self._replaces("")
            deletes = replaces and await self._deletes(quotes)
        finally:
            with contextlib.suppress(Broken):
                await self._requests.once(Call("DELETE", self._key))
        return Bucket(self._url, creates, replaces, deletes, quotes, _skew_ms(first))

    async def _replaces(self, quote: str = '"') -> bool:
        """Whether `If-Match`, with etags in `quote`, lets pass the right one and nothing else."""
        etag = plain_etag((await self._put({})).headers.get("ETag", ""))
        right = await self._put({"If-Match": f"{quote}{etag}{quote}"})
        return right.status == 200 and await self._is_refused({"If-Match": f"{quote}{_OTHER_ETAG}{quote}"})

    async def _deletes(self, quotes: bool) -> bool:
        condition = f'"{_OTHER_ETAG}"' if quotes else _OTHER_ETAG
        answer = await self._requests.once(Call("DELETE", self._key, {"If-Match": condition}))
        return _settled(answer).status == 412

    async def _is_refused(self, condition: dict[str, str]) -> bool:
        return (await self._put(condition)).status == 412

    async def _put(self, condition: dict[str, str]) -> Answer:
        self._puts += 1
        headers = {"Content-Type": "text/plain", **condition}
        return _settled(await self._requests.once(Call("PUT", self._key, headers, b"%d\n" % self._puts)))


def _settled(answer: Answer) -> Answer:
    if answer.is_passing:
        raise Refused(answer)
    return answer


def _warn(bucket: Bucket, name: str, shared: bool) -> None:
    if not bucket.is_conditional:
        ignored = "If-Match" if bucket.creates else "If-None-Match"
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
