"""The configuration as clients are told it: `GET {ns}/config` (wire section 10)."""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from pysync import protocol
from pysync.auth.authentication import Access
from pysync.auth.policy import Rule
from pysync.auth.spaces import MEMBER, OWNER, with_roles
from pysync.config import AppendOnly, Collection, Config
from pysync.config.schema import wire_name
from pysync.errors import PysyncError
from pysync.model import ANONYMOUS, Caller
from pysync.server.responses import Answer, version_matches
from pysync.server.router import Match

_NOBODY = Caller(roles=frozenset())


class _Shown(NamedTuple):
    """A collection as JSON text, and its rule."""

    text: bytes
    rule: Rule


class _Page(NamedTuple):
    """A manifest, ready to be sent."""

    body: bytes
    version: str
    headers: str


class Manifest:
    """The manifest of one namespace, or with None of the root collections and every namespace. The server's
    `configEndpoint` says whether it is filtered by the caller's roles."""

    def __init__(self, config: Config, access: Access, namespace: str | None = None) -> None:
        endpoint = config.config_endpoint
        self._filtered = endpoint is not None and endpoint.auth == "role-filtered"
        self._access = access
        self._of_somebody = frozenset({"self", OWNER, MEMBER} if config.auth.spaces else {"self"})
        self._collections = _shown(config, namespace)
        inner = config.namespaces if namespace is None else ()
        self._namespaces = {name: _shown(config, name) for name in inner}
        self._common = self._page(ANONYMOUS if self._filtered else None)

    async def serve(self, request: web.BaseRequest, match: Match) -> Answer:
        """`{"collections": [...], "namespaces": {name: {"collections": [...]}}}`, the latter where there are
        any. What credentials that do not hold are shown is nothing, and no error."""
        page = self._common
        if self._filtered and protocol.HEADER_AUTHORIZATION in request.headers:
            page = self._page(await self._caller(request))
        if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), page.version):
            return Answer(304, b"", page.headers)
        return Answer(200, page.body, page.headers)

    async def _caller(self, request: web.BaseRequest) -> Caller:
        """The caller. Whoever has an identity also has a path of their own, and may belong to spaces."""
        try:
            caller = await self._access.introduced(request.headers)
        except PysyncError:
            return _NOBODY
        return with_roles(caller, self._of_somebody) if caller.identity else caller

    def _page(self, caller: Caller | None) -> _Page:
        """Return the collections that `caller` is shown; None: all."""
        body = b'{"collections":' + _listed(self._collections, caller)
        if self._namespaces:
            spaces = (
                orjson.dumps(name) + b':{"collections":' + _listed(collections, caller) + b"}"
                for name, collections in self._namespaces.items()
            )
            body += b',"namespaces":{' + b",".join(spaces) + b"}"
        body += b"}"
        version = hashlib.sha256(body).hexdigest()
        control = "private, no-cache" if self._filtered else "no-cache"
        headers = f'Cache-Control: {control}\r\nVary: Authorization\r\nETag: "{version}"\r\n'
        return _Page(body, version, headers)


def _listed(collections: Iterable[_Shown], caller: Caller | None) -> bytes:
    texts = [shown.text for shown in collections if caller is None or _opens(shown.rule, caller)]
    return b"[" + b",".join(texts) + b"]"


def _opens(rule: Rule, caller: Caller) -> bool:
    found = rule.collection
    return not rule.held(caller).isdisjoint(found.read_roles + found.write_roles)


def _shown(config: Config, namespace: str | None) -> list[_Shown]:
    collections = config.collections if namespace is None else config.namespaces[namespace].collections
    return [
        _Shown(orjson.dumps(client_info(found)), Rule.of(config, namespace, found, "pull"))
        for found in collections
    ]


def client_info(collection: Collection) -> dict[str, Any]:
    """What clients are told of a collection. Members that do not apply are left out."""
    told: dict[str, Any] = {
        "name": collection.name,
        "maxBodyBytes": collection.max_body_bytes,
        "encryption": collection.encryption,
        "allowedMimeTypes": collection.allowed_mime_types,
    }
    optional: dict[str, Any] = {
        "pullOnly": collection.pull_only or None,
        "pushOnly": collection.push_only or None,
        "appendOnly": _append_only(collection.append_only),
        "ttlMs": collection.ttl_ms,
        "forceFullFetch": collection.force_full_fetch or None,
    }
    return told | {name: value for name, value in optional.items() if value is not None}


def _append_only(settings: AppendOnly | None) -> dict[str, Any] | None:
    """The settings as they were configured."""
    if settings is None:
        return None
    members = {wire_name(name): value for name, value in dataclasses.asdict(settings).items()}
    return {name: value for name, value in members.items() if value is not None}
