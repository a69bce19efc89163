"""Files that the server cannot read: sealed before they are pushed, opened after they were pulled
(docs/reference/protocol.md#sealed-files)."""

import asyncio

from pysync.client.files import FileMethods, check_size
from pysync.client.models import PushResult
from pysync.client.sealed.keyring import SEALED_OVERHEAD_BYTES, UnlockedKeyring
from pysync.client.transport import document_key
from pysync.protocol import OCTET_STREAM


async def seal_and_push_blob(
    client: FileMethods,
    keyring: UnlockedKeyring,
    key: str,
    plaintext: bytes,
    *,
    aad: str | None = None,
    max_bytes: int | None = None,
) -> PushResult:
    """Seal `plaintext` and store it at `key`. It opens only with the same `aad`, by default the key of the
    document, so that a server cannot pass one file off as another. Raises FileTooLarge above `max_bytes`, and
    as `Client.push_blob`. The file and the sealed file are held in memory."""
    check_size(len(plaintext), max_bytes)
    sealed = await asyncio.to_thread(keyring.seal_bytes, plaintext, _aad(key, aad))
    return await client.push_blob(key, sealed, OCTET_STREAM)


async def pull_and_open_blob(
    client: FileMethods,
    keyring: UnlockedKeyring,
    key: str,
    *,
    aad: str | None = None,
    max_bytes: int | None = None,
) -> bytes | None:
    """Return the plaintext of a file stored by `seal_and_push_blob`; None if nothing is stored. Raises as
    `UnlockedKeyring.open_bytes` and `Client.pull_blob`; `max_bytes` applies to the plaintext."""
    sealed_max = None if max_bytes is None else max_bytes + SEALED_OVERHEAD_BYTES
    blob = await client.pull_blob(key, max_bytes=sealed_max)
    if blob is None:
        return None
    return await asyncio.to_thread(keyring.open_bytes, blob.data, _aad(key, aad))


def _aad(key: str, aad: str | None) -> str:
    return document_key(key) if aad is None else aad
