"""Pulls and pushes of documents, with the keyring fold and earlier versions, and revocation lists.

See docs/reference/protocol.md#documents, docs/reference/protocol.md#keyring-fold,
docs/reference/protocol.md#history and docs/reference/protocol.md#revocation-lists.
"""

import re
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from pysync import _core
from pysync.auth import field_permissions
from pysync.auth.policy import AccessPolicy
from pysync.auth.rate_limits import Counter
from pysync.config import HistoryConfig, Limit
from pysync.config.key_templates import RESERVED, KeyTemplate
from pysync.engine.documents import STALE_BASE, CachedVersion
from pysync.engine.history import Entry
from pysync.engine.idempotency import IdempotentRequest
from pysync.erase.record import ErasureRecord
from pysync.errors import Conflict, Erased, InvalidWritten, NotFound, VersionNotFound
from pysync.model import Caller, WriteResult
from pysync.server.api import Service, owners_of
from pysync.server.api.plugin_hooks import plugin_response, push_with_plugins
from pysync.server.authorization import Access, unless_server_error
from pysync.server.http.in_flight import hold_until
from pysync.server.http.request_body import (
    check_sealed,
    idempotency_key,
    read_authorized_body,
    read_body,
    validate,
)
from pysync.server.http.responses import (
    NO_STORE,
    Response,
    bodiless_response,
    json_response,
    wants_body,
    write_response,
)
from pysync.server.http.router import Match

MAX_REVOCATION_BYTES = 262_144
REVOCATION_LIMIT = Limit(window_ms=60_000, max_requests=60)

_is_time = re.compile("[0-9]{1,15}").fullmatch


class DocumentHandlers:
    """The document routes of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._documents = service.documents
        self._authorizer = service.authorizer
        self._hooks = service.hooks

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/pull/<key>` (docs/reference/protocol.md#pull-a-document)."""
        access = await self._authorizer.authorize(request, match)
        if access.reply is not None:
            return plugin_response(request, match, access.reply)
        return await self._respond(request, match, access)

    async def push(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `POST {ns}/push/<key>` (docs/reference/protocol.md#push-a-document)."""
        # Read, authorise, decode.
        access, sent = await read_authorized_body(
            request, match, self._authorizer, self._service.in_flight, "document", _core.decode_push
        )
        body = await self._check_push(request, match, access, sent)
        if "?" in request.raw_path and (written_ms := request.query.get("written")) is not None:
            await self._check_erased(match.key, written_ms)
        # Store.
        store = partial(self._store, request, match, access, body, sent.hash)
        if self._hooks.has_push_hooks:
            return await push_with_plugins(self._service, request, match, access, body, store)
        written = await store()
        # Respond.
        version = written.hash
        if access.hidden:
            version = await self._service.visible_version(match, access, *written)
        return write_response(version, written.timestamp_ms)

    async def revoke(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `POST /revocations`. The signature of the list authorises the request
        (docs/reference/protocol.md#revocation-lists)."""
        bucket = f"revocations:{self._authorizer.client_ip(request)}"
        await self._service.rate_limiter.enforce([Counter(REVOCATION_LIMIT, bucket)])
        text = await read_body(request, MAX_REVOCATION_BYTES, self._service.in_flight)
        publish = self._service.revocations.publish(text)
        generation = await self._service.write_deadline.run(publish)
        return json_response({"ok": True, "generation": generation}, NO_STORE)

    async def revocations(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /revocations/<issuer>`: the list as it was published, for any caller."""
        text = await self._service.revocations.published(match.values[0])
        if text is None:
            raise NotFound
        return Response(200, text, "Cache-Control: no-cache\r\n")

    async def _respond(self, request: web.BaseRequest, match: Match, access: Access) -> Response:
        """Return the response to an authorised pull."""
        return await self.document_response(request, match, access, await self._load(request, match))

    def _load(
        self, request: web.BaseRequest, match: Match
    ) -> Awaitable[_core.Document | CachedVersion | None]:
        """Return the document of a pull, or only its version if the response may need no more."""
        read = self._documents.pull if wants_body(request) else self._documents.get_version
        return read(match.key, match.policy.collection.ttl_ms)

    async def document_response(
        self,
        request: web.BaseRequest,
        match: Match,
        access: Access,
        document: _core.Document | CachedVersion | None,
    ) -> Response:
        """Return the response to a pull of `document` (None: nothing is stored). Reads the document if only
        its version is known and that does not suffice."""
        now_ms = self._documents.now_ms()
        keyring = None
        if "?" in request.raw_path and request.query.get("withKeyring", "").lower() in ("1", "true"):
            keyring = await self._fold_keyring(match, access.signer, now_ms)
        if document is None:
            return Response(200, _empty(now_ms, keyring), match.route.read_headers)
        version = document.hash
        if access.hidden:
            version = await self._service.visible_version(match, access, document.hash, document.ts_ms)
        etag = version if keyring is None else f"{version}-{keyring[1]}"
        headers = f'{match.route.read_headers}ETag: "{etag}"\r\n'
        response = bodiless_response(request, etag, headers)
        if response is not None:
            return response
        if isinstance(document, CachedVersion):
            document = await self._documents.pull(match.key, match.policy.collection.ttl_ms)
            return await self.document_response(request, match, access, document)
        if not access.hidden:
            return Response(200, document.answer(now_ms, keyring and keyring[0]), headers)
        # The author's proof is left out, because it would verify guesses of the hidden members.
        data = orjson.Fragment(field_permissions.redact(document.data, access.hidden))
        members = {"data": data, "hash": version, "timestamp": now_ms}
        if keyring is not None:
            members["keyring"] = orjson.Fragment(keyring[0])
        return json_response(members, headers)

    async def _fold_keyring(self, match: Match, caller: Caller, now_ms: int) -> tuple[bytes, str] | None:
        """Return the JSON text of the response's `keyring` member, `null` if none is stored, and its version.
        Returns None if the caller may not read it, because of its scope or of the collections that own the
        key."""
        template = match.policy.collection.keyring_path
        key = f"{match.key}/_keyring" if template is None else KeyTemplate.of(template).fill(match.params)
        if key.startswith(f"{RESERVED}/") or (caller.scope is not None and not caller.scope.allows(key)):
            return None
        owners = owners_of(self._service.key_owners, key)
        for owner in owners:
            collection = owner.policy.collection
            if collection.push_only or collection.append_only is not None:
                continue
            params = owner.params
            decision = await self._authorizer.decide(owner.policy, caller, owner.identity, params, key)
            access = unless_server_error(decision)
            if access is not None:
                access = unless_server_error(await self._authorizer.veto(owner.policy, access, params, key))
            if access is not None:
                return await self._read_keyring(key, now_ms, collection.ttl_ms, access.hidden)
        return None if owners else await self._read_keyring(key, now_ms, None, frozenset())

    async def _read_keyring(
        self, key: str, now_ms: int, ttl_ms: int | None, hidden: frozenset[str]
    ) -> tuple[bytes, str]:
        keyring = await self._documents.pull(key, ttl_ms)
        if keyring is None:
            return b"null", ""
        data = field_permissions.redact(keyring.data, hidden) if hidden else keyring.data
        version = await self._documents.versions.load_and_compute(key, keyring.hash, keyring.ts_ms, hidden)
        entry = {"data": orjson.Fragment(data), "hash": version, "timestamp": now_ms}
        return orjson.dumps(entry), version

    async def _check_push(
        self, request: web.BaseRequest, match: Match, access: Access, body: _core.PushBody
    ) -> _core.PushBody:
        """Return the push as it is to be stored. Raises the error of data that the collection rejects."""
        if match.route.keyrings is not None:
            await check_sealed(match, body.data)
        if match.policy.collection.field_permissions:
            body = await self._apply_field_permissions(request, match, access, body)
        if match.route.validator is not None:
            await validate(match.route.validator, body.data)
        return body

    async def _check_erased(self, key: str, written_ms: str) -> None:
        """Raise Erased if an erasure covers what was written at a key at this time."""
        if not _is_time(written_ms):
            raise InvalidWritten
        if (await ErasureRecord.load(self._service.store)).has(key, int(written_ms)):
            raise Erased

    async def _store(
        self, request: web.BaseRequest, match: Match, access: Access, body: _core.PushBody, content: str
    ) -> WriteResult:
        """Store a push that was authorised and checked. `content` is the hash of the data that was sent."""
        ttl_ms, history = match.policy.collection.ttl_ms, match.policy.collection.history
        context = match.write_context(access.caller)
        once = idempotency_key(request, access.caller, match.key)
        idempotent = None if once is None else IdempotentRequest(once, content)
        try:
            return await self._service.write_deadline.run(
                self._documents.push(match.key, body, ttl_ms, context, history, idempotent),
                partial(hold_until, request),
            )
        except Conflict as error:
            current = error.current_hash, error.written_ms
        raise Conflict(await self._service.visible_version(match, access, *current))

    async def _apply_field_permissions(
        self, request: web.BaseRequest, match: Match, access: Access, body: _core.PushBody
    ) -> _core.PushBody:
        """Return the push with the members that the caller may not change as they are stored. If the base
        differs and the push has an Idempotency-Key, it may be a repetition: it is then returned with a base
        that no document has."""
        permissions, roles = match.policy.collection.field_permissions, access.roles
        if not body.base_hash:
            return field_permissions.preserve_read_only_fields(permissions, roles, body, None)
        current = await self._documents.pull(match.key, match.policy.collection.ttl_ms)
        version = ""
        if current is not None:
            version = await self._service.visible_version(match, access, current.hash, current.ts_ms)
            if version == body.base_hash:
                body = body if version == current.hash else body.rebased(current.hash)
                return field_permissions.preserve_read_only_fields(permissions, roles, body, current.data)
        if idempotency_key(request, access.caller, match.key) is None:
            raise Conflict(version)
        return body.rebased(STALE_BASE)


class _Version(NamedTuple):
    """A version: the current one, or an earlier one that was replaced at `replaced_ms`."""

    document: _core.Document
    replaced_ms: int | None


class HistoryHandlers(DocumentHandlers):
    """The reads of one collection with `history`. `policy` is that of its history route, and `headers` are
    the caching headers that it allows."""

    def __init__(self, service: Service, history: HistoryConfig, policy: AccessPolicy, headers: str) -> None:
        super().__init__(service)
        self._history = history
        self._policy = policy
        self._headers = headers

    async def list(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/history/<key>`: the versions of a document, the newest first."""
        access = await self._authorize(request, match)
        writers: dict[tuple[str, int], str] = {}
        versions: dict[tuple[str, int], dict[str, Any]] = {}
        async for each in self._each(match.key, writers):
            version = each.document.hash, each.document.ts_ms
            if version not in versions:
                versions[version] = await self._describe(match, access, each)
        for version, described in versions.items():
            if writers.get(version):
                described["identity"] = writers[version]
        return json_response(
            {"versions": list(versions.values()), "timestamp": self._documents.now_ms()}, NO_STORE
        )

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET {ns}/pull/<key>`, with `version` that version of the document."""
        wanted = request.query.get("version") if "?" in request.raw_path else None
        if wanted is None:
            return await super().pull(request, match)
        route = replace(match.route, policy=self._policy, read_headers=self._headers)
        match = match._replace(route=route, policy=self._policy)
        access = await self._authorize(request, match)
        async for each in self._each(match.key, {}):
            if await self._version(match, access, each.document) == wanted:
                return await self.document_response(request, match, access, each.document)
        raise VersionNotFound

    async def _authorize(self, request: web.BaseRequest, match: Match) -> Access:
        """Return the access of a reader of history. Raises NotFound if a plugin would respond to a pull, as
        for a document that is read together with others."""
        access = await self._authorizer.authorize(request, match)
        if access.reply is not None:
            raise NotFound
        return access

    async def _each(self, key: str, writers: dict[tuple[str, int], str]) -> AsyncIterator[_Version]:
        """Yield the versions of a document, the current one first. `writers` receives the identities of those
        who wrote them."""
        current = await self._documents.pull(key)
        if current is not None:
            yield _Version(current, None)
        entry: Entry
        async for entry in self._documents.history.entries(key, self._history):
            writers[entry.hash, entry.at_ms] = entry.identity
            if entry.replaced is not None:
                yield _Version(entry.replaced, entry.at_ms)

    async def _version(self, match: Match, access: Access, document: _core.Document) -> str:
        return await self._service.visible_version(match, access, document.hash, document.ts_ms)

    async def _describe(self, match: Match, access: Access, version: _Version) -> dict[str, Any]:
        document, data = version.document, version.document.data
        if access.hidden:
            data = field_permissions.redact(data, access.hidden)
        described = {
            "hash": await self._version(match, access, document),
            "timestamp": document.ts_ms,
            "size": len(data),
        }
        if version.replaced_ms is not None:
            described["replaced"] = version.replaced_ms
        if document.author_pubkey is not None and not access.hidden:
            described["authorPubkey"] = document.author_pubkey
        return described


def _empty(now_ms: int, keyring: tuple[bytes, str] | None) -> bytes:
    folded = b"" if keyring is None else b',"keyring":' + keyring[0]
    return b'{"data":{},"hash":"","timestamp":%d%b}' % (now_ms, folded)
