"""Credentials, endpoint and addressing, as aiobotocore finds them, and request signatures.

Signatures use botocore's algorithm, without the overhead of its general code path.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.auth import S3SigV4Auth
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import create_loader

from pysync.concurrency import CONCURRENT
from pysync.config import S3Location, StoreConfig
from pysync.errors import StoreUnavailable


class SignableRequest:
    """A request as the signer expects it. `url` is percent-encoded as it is sent; `sha256` (hex) is that of a
    body that is too long for memory."""

    __slots__ = ("body", "context", "headers", "method", "params", "url")

    def __init__(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, sha256: str | None = None
    ) -> None:
        self.method = method
        self.url = url
        self.headers = {name: " ".join(value.split()) for name, value in headers.items()}
        self.body = body
        self.params: Final = None
        self.context: dict[str, Any] = {} if sha256 is None else {"sha256": sha256}


class SigV4Signer(S3SigV4Auth):  # type: ignore[misc]
    """Signs requests with one set of credentials. The signature covers all headers and the body, which
    guarantees the integrity of an upload. `add_auth` completes the headers of a `SignableRequest`.

    The key that botocore derives for each request from credentials and date is cached for the day, and
    headers are processed once: 40 µs per request instead of 240.
    """

    def __init__(self, credentials: ReadOnlyCredentials, region: str) -> None:
        super().__init__(credentials, "s3", region)
        self._day = ""
        self._key = b""

    def headers_to_sign(self, request: SignableRequest) -> dict[str, str]:
        """Return all headers by lower-case name, sorted, with the host."""
        context = request.context
        if "signed" not in context:
            signed = {name.lower(): value for name, value in request.headers.items()}
            signed["host"] = _host(request.url)
            context["signed"] = dict(sorted(signed.items()))
        found: dict[str, str] = context["signed"]
        return found

    def canonical_headers(self, headers_to_sign: dict[str, str]) -> str:
        """Return the canonical text of these headers."""
        return "\n".join([f"{name}:{value}" for name, value in headers_to_sign.items()])

    def signed_headers(self, headers_to_sign: dict[str, str]) -> str:
        """Return the names of these headers, as the signature lists them."""
        return ";".join(headers_to_sign)

    def payload(self, request: SignableRequest) -> str:
        """Return the sha256 (hex) of the body."""
        known: str | None = request.context.get("sha256")
        return super().payload(request) if known is None else known

    def signature(self, string_to_sign: str, request: SignableRequest) -> str:
        """Return the signature, made with the day's key."""
        day = request.context["timestamp"][:8]
        if day != self._day:
            key = f"AWS4{self.credentials.secret_key}".encode()
            for part in (day, self._region_name, self._service_name, "aws4_request"):
                key = self._sign(key, part)
            self._day, self._key = day, key
        signature: str = self._sign(self._key, string_to_sign, hex=True)
        return signature


def _host(url: str) -> str:
    """Return the Host header of a request for `url`, which omits the default port of the scheme."""
    parts = urlsplit(url)
    return parts.netloc.removesuffix(":443" if parts.scheme == "https" else ":80")


NO_CREDENTIALS = (
    "no S3 credentials: set store.accessKeyId and store.secretAccessKey, or AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY in the environment (or a profile in ~/.aws), or give the machine a role"
)
_DESCRIPTIONS = create_loader()
"""botocore's descriptions of the AWS services, loaded once for all clients."""


class S3Client:
    """Access to one bucket. `client` is that of aiobotocore, for rare requests; `base` is the URL of the
    bucket, without a trailing slash. Create one with `open`, and close it."""

    def __init__(self, session: Any, client: Any, region: str, static: ReadOnlyCredentials | None) -> None:
        self._session = session
        self._region = region
        self._static = static
        self._signer: SigV4Signer | None = None
        self.client = client
        self.base = ""

    @classmethod
    async def open(cls, config: StoreConfig, location: S3Location) -> Self:
        """Open the client. Raises ValueError for an endpoint that is not a URL, StoreUnavailable if there are
        no credentials."""
        session = get_session()
        session.register_component("data_loader", _DESCRIPTIONS)
        region = location.region or session.get_config_variable("region") or "us-east-1"
        static = None
        if config.access_key_id is not None and config.secret_access_key is not None:
            static = ReadOnlyCredentials(config.access_key_id, config.secret_access_key, None)
        with translate_errors():
            client = await session.create_client(
                "s3",
                region_name=region,
                endpoint_url=location.endpoint,
                aws_access_key_id=config.access_key_id,
                aws_secret_access_key=config.secret_access_key,
                config=_client_config(config, location),
            ).__aenter__()
        account = cls(session, client, region, static)
        try:
            await account.signer()
            with translate_errors():
                url = await client.generate_presigned_url(
                    "get_object", {"Bucket": location.bucket, "Key": "x"}
                )
            account.base = url.partition("?")[0].removesuffix("/x")
        except BaseException:
            await account.close()
            raise
        return account

    async def signer(self) -> SigV4Signer:
        """Return the signer for the current credentials; those of a role change every few hours. Raises
        StoreUnavailable if there are none, or only expired ones."""
        frozen = self._static
        if frozen is None:
            try:
                credentials = await self._session.get_credentials()
                frozen = credentials and await credentials.get_frozen_credentials()
            except Exception as error:  # there are many providers, without a common error class
                raise StoreUnavailable from error
            if not frozen:
                raise StoreUnavailable(NO_CREDENTIALS)
        if self._signer is None or self._signer.credentials != frozen:
            self._signer = SigV4Signer(frozen, self._region)
        return self._signer

    async def close(self) -> None:
        """Close the connections."""
        await self.client.__aexit__(None, None, None)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn every error of aiobotocore into StoreUnavailable, except ValueError."""
    try:
        yield
    except (BotoCoreError, ClientError, aiohttp.ClientError, TimeoutError, OSError) as error:
        raise StoreUnavailable from error


def _client_config(config: StoreConfig, location: S3Location) -> AioConfig:
    timeout_s = config.timeout_ms / 1000
    return AioConfig(
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
        max_pool_connections=min(CONCURRENT, config.max_connections),
        retries={"mode": "standard", "total_max_attempts": 5},
        signature_version="s3v4",
        # By default botocore uses "path" for every custom endpoint, and the AWS host name without a region.
        s3={"addressing_style": "path" if location.path_style else "virtual"},
        # Many servers do not support checksums beyond the signature.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
