"""Files on their way from a server: what is told of them first, and their bytes across cuts."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import orjson

from pysync.client.connection import Unreachable, refusal
from pysync.protocol import JSON_TYPE, OPAQUE_TYPE

_EMPTY_DOCUMENT_BYTES: Final = 256
"""The answer where nothing is stored is shorter."""
_is_sha256 = re.compile("[0-9a-f]{64}").fullmatch
_content_range = re.compile(r"bytes ([0-9]+)-[0-9]+/(?:[0-9]+|\*)").fullmatch


class FileChanged(Unreachable):
    """A pull was cut, and when it went on the file was another."""


@dataclass(frozen=True, slots=True)
class FileHead:
    """What a server tells of a file before its bytes. `hash` is their SHA-256, in hex (another server's own
    version of them; None: it tells none), `size` their number, where it is told."""

    content_type: str
    hash: str | None
    size: int | None


class Progress:
    """How much of a file has come, to go on after a cut. `etag` is as it came."""

    def __init__(self, head: FileHead, etag: str) -> None:
        self.head = head
        self._etag = etag
        self._received = 0
        self._skip = 0
        self._digest = hashlib.sha256()

    @property
    def can_resume(self) -> bool:
        """Whether it can be told later that the file is still the same."""
        return self._etag.startswith('"')

    def headers(self) -> dict[str, str]:
        """What asks for the rest."""
        return {"Range": f"bytes={self._received}-", "If-Range": self._etag}

    async def resume(self, response: aiohttp.ClientResponse) -> None:
        """Take the answer for the rest, or for all of it once more. Raises FileChanged, and the refusal that
        other answers are."""
        if response.status not in (200, 206, 404, 416):
            raise refusal(response, await response.read())
        begins = _content_range(response.headers.get("Content-Range", ""))
        is_rest = response.status == 206 and begins is not None and int(begins[1]) == self._received
        is_whole = response.status == 200
        if not (is_rest or is_whole) or response.headers.get("ETag") != self._etag:
            raise FileChanged("the file is another since the pull was cut")
        self._skip = self._received if is_whole else 0

    def take(self, chunk: bytes) -> bytes:
        """What of `chunk` has not come before."""
        fresh, self._skip = chunk[self._skip :], max(0, self._skip - len(chunk))
        self._digest.update(fresh)
        self._received += len(fresh)
        return fresh

    def end(self) -> None:
        """Raises Unreachable where what came is not what the server has, and ValueError where that is no
        file."""
        if self.head.hash is None or not _is_sha256(self.head.hash):
            return
        if self._digest.hexdigest() != self.head.hash:
            if self.head.content_type.startswith(JSON_TYPE):
                raise ValueError("what is stored is a document, not a file")
            raise Unreachable("the file was damaged on its way: its hash is another")


async def begin(response: aiohttp.ClientResponse) -> tuple[Progress, bytes] | None:
    """What the first answer tells, and the first of its bytes; None where nothing is stored: `404` without a
    body, or the empty document, which has no ETag. Raises the refusal that other answers are."""
    if response.status != 200:
        answer = await response.read()
        if response.status == 404 and not answer:
            return None
        raise refusal(response, answer)
    headers = response.headers
    content_type, etag = headers.get("Content-Type", OPAQUE_TYPE), headers.get("ETag", "")
    first = b""
    if not etag and response.content_type == JSON_TYPE:
        first = await _first(response)
        if _is_empty_document(first):
            return None
    head = FileHead(content_type, etag.removeprefix("W/").strip('"') or None, _size(headers))
    return Progress(head, etag), first


async def _first(response: aiohttp.ClientResponse) -> bytes:
    first = b""
    async for chunk in response.content.iter_any():
        first += chunk
        if len(first) > _EMPTY_DOCUMENT_BYTES:
            break
    return first


def _is_empty_document(answer: bytes) -> bool:
    try:
        members = orjson.loads(answer)
    except ValueError:
        return False
    return isinstance(members, dict) and members.get("data") == {} and members.get("hash") == ""


def _size(headers: Mapping[str, str]) -> int | None:
    text = headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None
