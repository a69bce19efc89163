"""What writes of JSON have in common: how a body comes in, who made it, how it is known again."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec, TypeVar

from aiohttp import web

from pysync import _core, protocol
from pysync.auth import sealed
from pysync.auth.authentication import Access
from pysync.auth.signing import APPEND_AUTHOR, DOCUMENT_AUTHOR
from pysync.config import key_templates
from pysync.errors import BadRequest, Forbidden, UnsupportedMediaType
from pysync.model import Caller
from pysync.schema import Check
from pysync.server.body import read_body
from pysync.server.callers import Callers
from pysync.server.routes import Match
from pysync.store import JSON_TYPE

Authored = Literal["document", "append"]
"""What an author proof is of."""

_TAGS: Mapping[Authored, str] = {"document": DOCUMENT_AUTHOR, "append": APPEND_AUTHOR}

CHECK_IN_THREAD_ABOVE = 64 * 1024
IN_THREAD_ABOVE = 256 * 1024
"""Bytes that the core decodes in about 2 ms, without the interpreter's lock."""

P = ParamSpec("P")
T = TypeVar("T")

_is_idempotency_key = re.compile(r"[\x20-\x7e]{1,128}").fullmatch


async def receive(
    request: web.BaseRequest, match: Match, access: Access, callers: Callers, *, pushes: bool = False
) -> tuple[Caller, bytes]:
    """Return the caller of an allowed write, with its roles for it, and the body. The server refuses what it
    can by the headers before it reads the body. `pushes`: the write is the push of a document.

    Raises UnsupportedMediaType for what is not JSON, and what `Access.present`, `read_body` and
    `Callers.allowed` do.
    """
    rule = match.rule
    credentials = access.present(rule, request.headers)
    if media_type(request) != JSON_TYPE:
        raise UnsupportedMediaType(f"Content-Type must be {JSON_TYPE}")
    text = await read_body(request, rule.collection.max_body_bytes)
    _, caller = await callers.allowed(request, match, credentials, text, pushes=pushes)
    return caller, text


def media_type(request: web.BaseRequest) -> str:
    """What the body is sent as, without parameters, `""` where nobody says."""
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def aside(size: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """The result of work of the core's over `size` bytes: beside the event loop where these are many."""
    if size > IN_THREAD_ABOVE:
        return await asyncio.to_thread(work, *args, **options)
    return work(*args, **options)


def check_author(kind: Authored, body: _core.PushBody | _core.Append, caller: Caller, key: str) -> None:
    """Refuse an author proof that does not hold, or that another key than the presenter's made; a body
    without one is anybody's (clients-and-crypto section 5). Raises Forbidden."""
    if body.author_pubkey is None or body.author_signature is None:
        return
    if caller.presenter and body.author_pubkey != caller.presenter:
        raise Forbidden(f"{kind} author must be the request presenter")
    if not _core.verify_author(_TAGS[kind], key, body.canonical, body.author_pubkey, body.author_signature):
        raise Forbidden(f"invalid {kind} author signature")


async def check_sealed(match: Match, data: bytes) -> None:
    """Refuse data that is not sealed, where the collection takes no other; a keyring is plaintext. Raises
    DataNotSealed."""
    keyrings = match.route.keyrings
    if keyrings is None or match.key.rpartition("/")[2] == sealed.KEYRING:
        return
    if not any(key_templates.matches(keyring, match.key) for keyring in keyrings):
        await apply(sealed.check_sealed, data)


async def apply(check: Check, data: bytes) -> None:
    """Run a schema's check, beside the event loop where there is much to look at."""
    if len(data) > CHECK_IN_THREAD_ABOVE:
        await asyncio.to_thread(check, data)
    else:
        check(data)


def request_key(request: web.BaseRequest, caller: Caller, key: str) -> str | None:
    """Under what a repetition of this write is recognised: it belongs to one caller and one document. None
    where the client asks for nothing. Raises BadRequest for an unusable Idempotency-Key."""
    sent = request.headers.get(protocol.HEADER_IDEMPOTENCY_KEY)
    if sent is None:
        return None
    if not _is_idempotency_key(sent):
        raise BadRequest("Idempotency-Key must be 1 to 128 printable ASCII characters")
    holder = caller.presenter or ("admin" if "admin" in caller.roles else "")
    return f"{holder} {key} {sent}"
