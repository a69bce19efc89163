"""Routes of the service itself: health, readiness, metrics and version, the manifest of its configuration
(docs/reference/protocol.md#configuration-manifest), and example files.

Example files are for people who try the service in a browser; `server.examples` names their folder.

"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from pysync import __version__, protocol
from pysync.auth.authentication import ADMIN_CALLER, BEARER
from pysync.auth.policy import AccessPolicy
from pysync.auth.spaces import MEMBER, OWNER, add_roles
from pysync.config import Collection, Config
from pysync.config.collection import wire_name
from pysync.config.key_templates import is_parameter
from pysync.errors import NotFound, Overloaded, PysyncError
from pysync.model import ANONYMOUS, Caller
from pysync.protocol import JSON_TYPE
from pysync.server.authorization import Authorizer
from pysync.server.metrics import METRICS_TYPE
from pysync.server.readiness import Readiness
from pysync.server.responses import (
    NO_STORE,
    Response,
    cache_headers,
    error_response,
    etag_matches,
    json_response,
)
from pysync.server.router import Match

MAX_BYTES: Final = 1024 * 1024
INDEX: Final = "index.html"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": JSON_TYPE,
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# A page may have inline scripts and styles, and may call only this service.
_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
VERSION: Final = {"name": "pysync", "version": __version__, "protocol": "3.0"}
_HEADERS: Final = (
    "Cache-Control: no-cache\r\n"
    f"Content-Security-Policy: {_POLICY}\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "X-Content-Type-Options: nosniff\r\n"
)


class Examples:
    """The files of `folder`. Their names are read once, their content for each request, so that an edited
    page needs only a reload. Raises ValueError if there is no such folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        names = file_names(folder)
        self.paths = ["", *names] if INDEX in names else names
        """The last segments of the paths that are served; `""` is the index."""

    async def serve(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve the file of the route. Raises NotFound if the file is gone, too large, or now a symbolic
        link."""
        name = match.route.template[-1] or INDEX
        content = await asyncio.to_thread(_read, self._folder / name)
        version = hashlib.sha256(content).hexdigest()
        headers = f'{_HEADERS}ETag: "{version}"\r\n'
        if etag_matches(request, version):
            return Response(304, b"", headers)
        return Response(200, content, headers, content_type=media_type(name))


def file_names(folder: str) -> list[str]:
    """Return the sorted names of the files in `folder` that are served: regular files of a known type whose
    names are valid path parameters and do not start with a dot. Raises ValueError if there is no such folder.
    """
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if _is_served(entry))
    except OSError as error:
        raise ValueError(f"server.examples: {folder}: {error.strerror}") from None


def media_type(name: str) -> str:
    """Return the media type of a file, or of the index for `""`."""
    return _TYPES[PurePath(name or INDEX).suffix]


def _is_served(entry: "os.DirEntry[str]") -> bool:
    name = entry.name
    is_plain = entry.is_file(follow_symlinks=False)
    return is_plain and PurePath(name).suffix in _TYPES and name[0] != "." and bool(is_parameter(name))


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_nofollow) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError:
        raise NotFound from None
    if len(content) > MAX_BYTES:
        raise NotFound
    return content


def _open_nofollow(path: str, flags: int) -> int:
    """Open a file, but not through a symbolic link, and without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class ServiceHandlers:
    """The routes for operators."""

    def __init__(
        self,
        readiness: Readiness,
        render_metrics: Callable[[], bytes],
        authorizer: Authorizer,
        now_ms: Callable[[], int],
    ) -> None:
        self._readiness = readiness
        self._render_metrics = render_metrics
        self._authorizer = authorizer
        self._now_ms = now_ms

    async def health(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /health`: the process responds."""
        return json_response({"ok": True, "ts": self._now_ms()}, NO_STORE)

    async def ready(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /health/ready`: the store and the coordinator work, and the service is not stopping."""
        if (error := await self._readiness.check()) is not None:
            return error_response(error)  # not raised: the change is logged, not each request
        return json_response(self._readiness.body(self._now_ms()), NO_STORE)

    async def metrics(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /metrics`, in Prometheus' text format, to processes of this machine and to the holder of
        the admin token. For others it does not exist."""
        if not (is_local(request.headers, request.remote) or await self._is_admin(request)):
            raise NotFound
        return Response(200, self._render_metrics(), NO_STORE, content_type=METRICS_TYPE)

    async def _is_admin(self, request: web.BaseRequest) -> bool:
        if not request.headers.get(protocol.HEADER_AUTHORIZATION, "").startswith(BEARER):
            return False
        try:
            return await self._authorizer.identify_unverified(request) is ADMIN_CALLER
        except PysyncError:
            return False

    async def version(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve `GET /version`."""
        return json_response(VERSION, NO_STORE)


def is_local(headers: Mapping[str, str], peer: str | None) -> bool:
    """Return True if a request comes from this machine, and was not forwarded by a proxy on it."""
    if "X-Forwarded-For" in headers or "Forwarded" in headers:
        return False
    try:
        return ip_address(peer or "").is_loopback
    except ValueError:
        return False


_NO_CALLER = Caller(roles=frozenset())


class CallerResolver:
    """Finds out for whom collections are listed. A caller with an identity also has the role `self`, and may
    belong to spaces."""

    def __init__(self, config: Config, authorizer: Authorizer) -> None:
        self._authorizer = authorizer
        self._identity_roles = frozenset({"self", OWNER, MEMBER} if config.auth.spaces else {"self"})

    async def resolve(self, request: web.BaseRequest) -> Caller:
        """Return the caller that the headers claim; one without any role for invalid credentials. Raises
        Overloaded."""
        if protocol.HEADER_AUTHORIZATION not in request.headers:
            return ANONYMOUS
        try:
            caller = await self._authorizer.identify_unverified(request)
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
    texts = [text for text, policy in collections if caller is None or is_visible(policy, caller)]
    return b"[" + b",".join(texts) + b"]"


def is_visible(policy: AccessPolicy, caller: Caller) -> bool:
    """Return True if the manifest shows a collection to `caller`, who may read or write it."""
    found = policy.collection
    return not policy.trusted_roles(caller).isdisjoint(found.read_roles + found.write_roles)


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
