"""The manifest of the configuration (docs/reference/protocol.md#configuration-manifest)."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from pysync import protocol
from pysync.auth.authentication import Authenticator
from pysync.auth.policy import AccessPolicy
from pysync.auth.spaces import MEMBER, OWNER, add_roles
from pysync.config import Collection, Config
from pysync.config.collection import wire_name
from pysync.errors import Overloaded, PysyncError
from pysync.model import ANONYMOUS, Caller
from pysync.server.http.responses import (
    Response,
    cache_headers,
    etag_matches,
)
from pysync.server.http.router import Match

_NO_CALLER = Caller(roles=frozenset())


class CallerResolver:
    """Finds out for whom collections are listed. A caller with an identity also has the role `self`, and may
    belong to spaces."""

    def __init__(self, config: Config, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._identity_roles = frozenset({"self", OWNER, MEMBER} if config.auth.spaces else {"self"})

    async def resolve(self, request: web.BaseRequest) -> Caller:
        """Return the caller that the headers claim; one without any role for invalid credentials. Raises
        Overloaded."""
        if protocol.HEADER_AUTHORIZATION not in request.headers:
            return ANONYMOUS
        try:
            caller = await self._authenticator.identify_unverified(request.headers)
        except Overloaded:
            raise
        except PysyncError:
            return _NO_CALLER
        return add_roles(caller, self._identity_roles) if caller.identity else caller


class _Entry(NamedTuple):
    """A collection as JSON text, and its policy."""

    text: bytes
    policy: AccessPolicy


class _RenderedManifest(NamedTuple):
    """A manifest that is ready to be sent."""

    body: bytes
    version: str
    headers: str


class Manifest:
    """The manifest of one namespace, or with None of the root collections and every namespace. The server's
    `configEndpoint` decides if it is filtered by the caller's roles."""

    def __init__(self, config: Config, callers: CallerResolver, namespace: str | None = None) -> None:
        endpoint = config.config_endpoint
        self._filtered = endpoint is not None and endpoint.auth == "role-filtered"
        self._callers = callers
        self._collections = _entries(config, namespace)
        inner = config.namespaces if namespace is None else ()
        self._namespaces = {name: _entries(config, name) for name in inner}
        self._common = self._render(ANONYMOUS if self._filtered else None)

    async def serve(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `{"collections": [...], "namespaces": {name: {"collections": [...]}}}`; `namespaces` is left
        out if there are none. Invalid credentials lead to an empty manifest, not to an error."""
        page = self._common
        if self._filtered and protocol.HEADER_AUTHORIZATION in request.headers:
            page = self._render(await self._callers.resolve(request))
        if etag_matches(request, page.version):
            return Response(304, b"", page.headers)
        return Response(200, page.body, page.headers)

    def _render(self, caller: Caller | None) -> _RenderedManifest:
        """Render the collections that `caller` may see; all of them if it is None."""
        body = b'{"collections":' + _json_list(self._collections, caller)
        if self._namespaces:
            spaces = (
                orjson.dumps(name) + b':{"collections":' + _json_list(collections, caller) + b"}"
                for name, collections in self._namespaces.items()
            )
            body += b',"namespaces":{' + b",".join(spaces) + b"}"
        body += b"}"
        version = hashlib.sha256(body).hexdigest()
        headers = f'{cache_headers((), is_public=not self._filtered)}ETag: "{version}"\r\n'
        return _RenderedManifest(body, version, headers)


def _json_list(collections: Iterable[_Entry], caller: Caller | None) -> bytes:
    texts = [text for text, policy in collections if caller is None or policy.is_visible(caller)]
    return b"[" + b",".join(texts) + b"]"


def _entries(config: Config, namespace: str | None) -> list[_Entry]:
    collections = config.collections if namespace is None else config.namespaces[namespace].collections
    return [
        _Entry(orjson.dumps(client_info(found)), AccessPolicy.from_config(config, namespace, found, "pull"))
        for found in collections
    ]


def client_info(collection: Collection) -> dict[str, Any]:
    """Return the description of a collection for clients. Members that do not apply are left out."""
    log = collection.append_only
    optional: dict[str, Any] = {
        "pullOnly": collection.pull_only or None,
        "pushOnly": collection.push_only or None,
        "appendOnly": None if log is None else _present({wire_name(k): v for k, v in asdict(log).items()}),
        "ttlMs": collection.ttl_ms,
        "forceFullFetch": collection.force_full_fetch or None,
    }
    return {
        "name": collection.name,
        "maxBodyBytes": collection.max_body_bytes,
        "encryption": collection.encryption,
        "allowedMimeTypes": collection.allowed_mime_types,
        **_present(optional),
    }


def _present(members: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}
