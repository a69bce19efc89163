"""Handlers: decode the request, ask access, call the verb, encode the answer.

The keyring fold: a document's `_keyring` sibling in the same answer (wire section 4).
"""

from collections.abc import Sequence
from contextlib import suppress

import orjson
from aiohttp import web

from pysync import _core, protocol
from pysync.auth import field_permissions
from pysync.auth.authentication import Access
from pysync.auth.revocation import Revocations
from pysync.config import Limit
from pysync.config.key_templates import RESERVED, document_key
from pysync.engine.documents import Documents, Known
from pysync.errors import Conflict, Forbidden, IdempotencyKeyReused, NotFound, PysyncError
from pysync.model import ANONYMOUS, Caller, Written
from pysync.plugins.hooks import Hooks
from pysync.server.authorization import Callers, Roles, request_of
from pysync.server.request_body import (
    apply,
    aside,
    check_author,
    check_sealed,
    read_body,
    receive,
    request_key,
)
from pysync.server.responses import NO_STORE, Answer, HeadAnswer, version_matches, wants_body
from pysync.server.router import Match, RouteTable


class Keyrings:
    """Finds the keyrings of documents. `owners` say which collection, by its rule for pulls, a key belongs
    to: one table for each namespace, with every collection in it, pulled or not."""

    def __init__(
        self, documents: Documents, roles: Roles, hooks: Hooks, owners: Sequence[RouteTable]
    ) -> None:
        self._documents = documents
        self._roles = roles
        self._hooks = hooks
        self._owners = owners

    async def fold(self, match: Match, caller: Caller, now_ms: int) -> tuple[bytes, str] | None:
        """The JSON text of the answer's `keyring` member, `null` where none is stored, and its version. None
        where the caller may not read it: its scope, or the collections that own the key, do not allow it."""
        key = _keyring_key(match)
        if key.startswith(f"{RESERVED}/"):
            return None
        owners = self._owners_of(key)
        for owner in owners:
            reader = await self._reader(owner, caller)
            if reader is not None:
                return await self._read(key, now_ms, owner, reader)
        if owners or (caller.scope is not None and not caller.scope.allows(key)):
            return None
        return await self._read(key, now_ms)

    async def _read(
        self, key: str, now_ms: int, owner: Match | None = None, reader: Caller = ANONYMOUS
    ) -> tuple[bytes, str]:
        keyring = await self._documents.pull(key, owner.rule.collection.ttl_ms if owner else None)
        if keyring is None:
            return b"null", ""
        hidden: frozenset[str] = frozenset()
        if owner is not None:
            roles = owner.rule.roles_of(reader, owner.identity)
            hidden = field_permissions.hidden(owner.rule.collection.field_permissions, roles)
        data = field_permissions.without(keyring.data, hidden) if hidden else keyring.data
        version = await self._documents.versions.told(key, keyring.hash, keyring.ts_ms, hidden)
        entry = {"data": orjson.Fragment(data), "hash": version, "timestamp": now_ms}
        return orjson.dumps(entry), version

    async def _reader(self, owner: Match, caller: Caller) -> Caller | None:
        """`caller` with the roles that it has for the key alone; None where a pull of its own would not give
        it a document of `owner`."""
        rule = owner.rule
        collection = rule.collection
        if (
            collection.push_only
            or collection.append_only is not None
            or (caller is ANONYMOUS and not rule.admits_anonymous)
        ):
            return None
        try:
            if rule.by_request:
                caller = await self._roles.enriched(rule, caller, owner.params, owner.key)
            if not rule.permits(caller, owner.identity, owner.key):
                return None
            if self._hooks.pulls:
                await self._hooks.leave(request_of(rule, caller, owner.params, owner.key))
        except PysyncError as error:
            if error.status >= 500:
                raise
            return None
        return caller

    def _owners_of(self, key: str) -> list[Match]:
        found = []
        for table in self._owners:
            try:
                found.append(table.match("GET", f"/{key}"))
            except PysyncError:
                continue
        return found


def _keyring_key(match: Match) -> str:
    template = match.rule.collection.keyring_path
    if template is None:
        return f"{match.key}/_keyring"
    return document_key(template.split("/"), match.params)


MAX_REVOCATION_BYTES = 262_144
_STALE = "stale"
"""A base that nothing has."""
REVOCATION_LIMIT = Limit(window_ms=60_000, max_requests=60)


class Handlers:
    """The document routes of one service."""

    def __init__(
        self,
        documents: Documents,
        access: Access,
        callers: Callers,
        revocations: Revocations,
        keyrings: Keyrings,
    ) -> None:
        self._documents = documents
        self._access = access
        self._callers = callers
        self._revocations = revocations
        self._keyrings = keyrings

    async def pull(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET {ns}/pull/<key>` (wire section 4)."""
        signer, caller = await self._callers.reader(request, match)
        return await self._read(request, match, signer, caller)

    async def push(self, request: web.BaseRequest, match: Match) -> Answer:
        """`POST {ns}/push/<key>` (wire section 4)."""
        caller, body = await self._received(request, match)
        written = await self._made(request, match, caller, body)
        told = await self._told(match, caller, written)
        return Answer(200, protocol.written_body(told, written.timestamp_ms), NO_STORE)

    async def revoke(self, request: web.BaseRequest, match: Match) -> Answer:
        """`POST /revocations`: the list is its own proof (wire section 3)."""
        await self._access.count(REVOCATION_LIMIT, f"revocations:{self._callers.address(request)}")
        text = await read_body(request, MAX_REVOCATION_BYTES)
        generation = await self._revocations.publish(text)
        return Answer(200, orjson.dumps({"ok": True, "generation": generation}), NO_STORE)

    async def revocations(self, request: web.BaseRequest, match: Match) -> Answer:
        """`GET /revocations/<issuer>`: the list as it was published, for anybody."""
        text = await self._revocations.published(match.values[0])
        if text is None:
            raise NotFound
        return Answer(200, text, "Cache-Control: no-cache\r\n")

    async def _read(self, request: web.BaseRequest, match: Match, signer: Caller, caller: Caller) -> Answer:
        """The answer to a pull that is allowed: `caller` is the `signer` with its roles for this document."""
        document = await self._found(request, match)
        return await self._document(request, match, signer, caller, document)

    async def _found(self, request: web.BaseRequest, match: Match) -> _core.Document | Known | None:
        """The document of a pull, or only its version where that may be all that is told."""
        read = self._documents.pull if wants_body(request) else self._documents.look
        return await read(match.key, match.rule.collection.ttl_ms)

    async def _document(
        self,
        request: web.BaseRequest,
        match: Match,
        signer: Caller,
        caller: Caller,
        document: _core.Document | Known | None,
    ) -> Answer:
        """The answer to a pull of `document` (None: there is none). Reads the document if only its version is
        known and that does not suffice."""
        rule = match.rule
        now_ms = self._documents.now_ms()
        keyring = None
        if "?" in request.raw_path and request.query.get("withKeyring", "").lower() in ("1", "true"):
            keyring = await self._keyrings.fold(match, signer, now_ms)
        if document is None:
            return Answer(200, _missing(now_ms, keyring), match.route.read_headers)
        permissions = rule.collection.field_permissions
        hidden: frozenset[str] = frozenset()
        if permissions:
            hidden = field_permissions.hidden(permissions, rule.roles_of(caller, match.identity))
        if not hidden and keyring is None:
            headers = f'{match.route.read_headers}ETag: "{document.hash}"\r\n'
            if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), document.hash):
                return Answer(304, b"", headers)
            if request.method == "HEAD":
                return HeadAnswer(headers)
        if isinstance(document, Known):
            document = await self._documents.pull(match.key, rule.collection.ttl_ms)
            return await self._document(request, match, signer, caller, document)
        if not hidden and keyring is None:
            return Answer(200, document.answer(now_ms), headers)
        version = await self._documents.versions.told(match.key, document.hash, document.ts_ms, hidden)
        return _variant(request, match, document, hidden, version, keyring, now_ms)

    async def _received(self, request: web.BaseRequest, match: Match) -> tuple[Caller, _core.PushBody]:
        """Who pushes, with its roles for this document, and what: allowed and checked."""
        rule = match.rule
        caller, text = await receive(request, match, self._access, self._callers, pushes=True)
        body = await aside(len(text), _core.decode_push, text)
        await aside(len(text), check_author, "document", body, caller, match.key)
        if match.route.keyrings is not None:
            await check_sealed(match, body.data)
        if rule.collection.field_permissions:
            body = await self._guarded(request, match, caller, body)
        if match.route.check is not None:
            await apply(match.route.check, body.data)
        return caller, body

    async def _made(
        self, request: web.BaseRequest, match: Match, caller: Caller, body: _core.PushBody
    ) -> Written:
        """Store a push that is allowed and checked."""
        ttl_ms = match.rule.collection.ttl_ms
        subject = match.subject(caller)
        once = request_key(request, caller, match.key)
        try:
            if once is None:
                return await self._documents.push(match.key, body, ttl_ms, subject)
            return await self._documents.push_once(match.key, body, once, ttl_ms, subject)
        except IdempotencyKeyReused:
            if body.base_hash != _STALE:
                raise
            # Members that the caller may not change have changed meanwhile, and so has the merged data.
            raise await self._conflict(match, caller) from None
        except Conflict as error:
            current = Written(error.current_hash, error.written_ms)
            raise Conflict(await self._told(match, caller, current)) from None

    async def _conflict(self, match: Match, caller: Caller) -> Conflict:
        """Return the error for a push whose base is not the stored version."""
        current = await self._documents.pull(match.key, match.rule.collection.ttl_ms)
        if current is None:
            return Conflict("")
        return Conflict(await self._told(match, caller, Written(current.hash, current.ts_ms)))

    async def _told(self, match: Match, caller: Caller, written: Written) -> str:
        """The version that the caller gets for a hash."""
        return await self._documents.versions.told_to(match.rule, caller, match.identity, match.key, written)

    async def _guarded(
        self, request: web.BaseRequest, match: Match, caller: Caller, body: _core.PushBody
    ) -> _core.PushBody:
        """The push as far as the caller may change the members of the document. Of one that its
        Idempotency-Key may show to be a repetition the base is not decided on."""
        permissions, roles = (
            match.rule.collection.field_permissions,
            match.rule.roles_of(caller, match.identity),
        )
        if not body.base_hash:
            return field_permissions.guarded(permissions, roles, body, None)
        current = await self._documents.pull(match.key, match.rule.collection.ttl_ms)
        if current is None:
            raise Conflict("")
        version = await self._told(match, caller, Written(current.hash, current.ts_ms))
        if version == body.base_hash:
            body = body if version == current.hash else body.rebased(current.hash)
            return field_permissions.guarded(permissions, roles, body, current.data)
        if request_key(request, caller, match.key) is None:
            raise Conflict(version)
        with suppress(Forbidden):
            # Not over the base that it names, which may be a guess of the hash.
            return field_permissions.guarded(permissions, roles, body.rebased(_STALE), current.data)
        raise Conflict(version)


def _variant(
    request: web.BaseRequest,
    match: Match,
    document: _core.Document,
    hidden: frozenset[str],
    version: str,
    keyring: tuple[bytes, str] | None,
    now_ms: int,
) -> Answer:
    """The answer for a reader who gets only a part of the document, or of its keyring; `version` is the keyed
    one. The author's proof is left out, since it would verify guesses of the rest."""
    etag = version if keyring is None else f"{version}-{keyring[1]}"
    headers = f'{match.route.read_headers}ETag: "{etag}"\r\n'
    if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), etag):
        return Answer(304, b"", headers)
    if request.method == "HEAD":
        return HeadAnswer(headers)
    if not hidden:
        return Answer(200, document.answer(now_ms, keyring and keyring[0]), headers)
    data = orjson.Fragment(field_permissions.without(document.data, hidden))
    members = {"data": data, "hash": version, "timestamp": now_ms}
    if keyring is not None:
        members["keyring"] = orjson.Fragment(keyring[0])
    return Answer(200, orjson.dumps(members), headers)


def _missing(now_ms: int, keyring: tuple[bytes, str] | None) -> bytes:
    folded = b"" if keyring is None else b',"keyring":' + keyring[0]
    return b'{"data":{},"hash":"","timestamp":%d%b}' % (now_ms, folded)
