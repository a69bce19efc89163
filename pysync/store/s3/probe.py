"""The probe at start: tests that the bucket can be used, and which conditions its server honours."""

import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar
from urllib.parse import urlsplit

from pysync.clock import CLOCK_TOLERANCE_MS
from pysync.config import S3Location
from pysync.errors import StoreUnavailable
from pysync.store.s3.credentials import S3Client, translate_errors
from pysync.store.s3.http import S3ConnectionError, S3Error, S3Request, S3RequestSender, S3Response
from pysync.store.s3.versions import BucketCapabilities, unquote_etag
from pysync.write_ids import new_write_id

T = TypeVar("T")

log = logging.getLogger(__name__)

PROBES: Final = "_pysync/probe"
"""The object that the store writes to test its bucket, and the prefix of others. No listing shows them."""

_OTHER_ETAG: Final = "0" * 32
_REGION: Final = re.compile(rb"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
_REQUIRED_PERMISSIONS: Final = (
    "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload"
)
_HINTS: Final = {
    "NoSuchBucket": "there is no such bucket: create it, or correct store.url",
    "InvalidAccessKeyId": "the access key is not known there: correct store.accessKeyId or AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": (
        "the secret key is not that of the access key: correct store.secretAccessKey or AWS_SECRET_ACCESS_KEY"
    ),
    "ExpiredToken": "the credentials have expired: renew them",
    "InvalidToken": "the session token is not valid: renew the credentials",
    "AccessDenied": f"the credentials do not allow what is needed: {_REQUIRED_PERMISSIONS}",
}


async def probe_bucket(
    account: S3Client, requests: S3RequestSender, location: S3Location, shared: bool
) -> BucketCapabilities:
    """Return the capabilities of the bucket's server, tested with objects that are removed again.

    Raises StoreUnavailable if the bucket cannot be used, and ValueError if it is `shared` and does not
    support that. The message of both says what to do.
    """
    name = f"s3://{location.bucket} at {urlsplit(account.base).hostname}"
    try:
        bucket = await _Probe(requests, account.base).run()
    except (S3ConnectionError, S3Error) as error:
        raise StoreUnavailable(f"{name}: {_describe(error)}") from error
    try:
        with translate_errors():
            await account.client.list_objects_v2(Bucket=location.bucket, Prefix=requests.root, MaxKeys=1)
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{name}: its keys cannot be listed: {error.__cause__}") from error
    _warn(bucket, name, shared)
    return bucket


class _Probe:
    """One probe, on a random key. Raises S3ConnectionError and S3Error. Steps are retried if their outcome is
    lost, so none relies on the result of the previous one."""

    def __init__(self, requests: S3RequestSender, url: str) -> None:
        self._requests = requests
        self._url = url
        self._key = f"{PROBES}/{new_write_id()}"
        self._puts = 0

    async def run(self) -> BucketCapabilities:
        """Return the capabilities of the bucket."""
        first = await self._retry(self._put)
        if first.status != 200 or "ETag" not in first.headers:
            raise S3Error(first)
        try:
            creates = await self._is_rejected("If-None-Match", "*")
            quoted = await self._honours_if_match('"')
            plain = not quoted and await self._honours_if_match("")
            deletes = (quoted or plain) and await self._honours_delete_if_match('"' if quoted else "")
        finally:
            with contextlib.suppress(StoreUnavailable):
                await self._requests.send(S3Request("DELETE", self._key), 204, 404)
        return BucketCapabilities(
            url=self._url,
            if_none_match=creates,
            if_match=quoted or plain,
            delete_if_match=deletes,
            quoted_etags=not plain,
            skew_ms=_skew_ms(first),
        )

    async def _honours_if_match(self, quote: str) -> bool:
        """Return True if `If-Match`, with etags in `quote`, accepts the current etag and no other."""

        async def is_passed() -> bool:
            etag = unquote_etag((await self._put()).headers.get("ETag", ""))
            return (await self._put("If-Match", f"{quote}{etag}{quote}")).status == 200

        return await self._retry(is_passed) and await self._is_rejected(
            "If-Match", f"{quote}{_OTHER_ETAG}{quote}"
        )

    async def _honours_delete_if_match(self, quote: str) -> bool:
        condition = {"If-Match": f"{quote}{_OTHER_ETAG}{quote}"}
        response = await self._retry(lambda: self._send(S3Request("DELETE", self._key, condition)))
        return response.status == 412

    async def _is_rejected(self, name: str, value: str) -> bool:
        return (await self._retry(lambda: self._put(name, value))).status == 412

    async def _put(self, name: str = "Content-Type", value: str = "text/plain") -> S3Response:
        self._puts += 1
        headers = {"Content-Type": "text/plain", name: value}
        return await self._send(S3Request("PUT", self._key, headers, b"%d\n" % self._puts))

    async def _send(self, call: S3Request) -> S3Response:
        response = await self._requests.send_once(call)
        if response.is_transient:
            raise S3Error(response)
        return response

    async def _retry(self, step: Callable[[], Awaitable[T]]) -> T:
        attempts = self._requests.retry_state()
        while True:
            try:
                return await step()
            except (S3ConnectionError, S3Error) as error:
                if not error.is_transient or not await attempts.next_attempt():
                    raise


def _warn(bucket: BucketCapabilities, name: str, shared: bool) -> None:
    if not bucket.is_conditional:
        ignored = " and ".join(bucket.ignored_conditions)
        if shared:
            raise ValueError(f"store: {name} ignores {ignored}: it cannot be served by more than one process")
        log.warning("%s ignores %s: no other process may serve it beside this one", name, ignored)
    if abs(bucket.skew_ms) > CLOCK_TOLERANCE_MS:
        log.warning("%s: %s", name, _describe_skew(bucket.skew_ms))


def _describe(error: S3ConnectionError | S3Error) -> str:
    """Return a sentence that says what failed, and what to do."""
    if isinstance(error, S3ConnectionError):
        return f"it cannot be reached: {error}"
    response = error.response
    if response.code == "RequestTimeTooSkewed":
        return _describe_skew(_skew_ms(response))
    region = response.headers.get("x-amz-bucket-region") or _named_region(response.body)
    if response.status in (301, 307, 400) and region:
        return f"the bucket is in another region: set store.region to {region}"
    return _HINTS.get(response.code, str(error))


def _named_region(body: bytes) -> str:
    found = _REGION.search(body)
    return (found[1] or found[2]).decode() if found else ""


def _skew_ms(response: S3Response) -> int:
    said = response.headers.get("Date")
    return 0 if said is None else round((time.time() - parsedate_to_datetime(said).timestamp()) * 1000)


def _describe_skew(skew_ms: int) -> str:
    side = "ahead of" if skew_ms > 0 else "behind"
    return f"this machine's clock is {abs(skew_ms) // 1000} s {side} the server's: set it"
