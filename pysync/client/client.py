"""The client: one method for each call of the protocol (docs/reference/protocol.md#overview)."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from pysync._core import decode_push
from pysync.auth import signing
from pysync.auth.certificates import RevocationList, parse_revocation_list
from pysync.auth.signing import Signer
from pysync.client.files import FileMethods
from pysync.client.models import (
    BatchEntry,
    DocumentVersion,
    LogElement,
    LogRange,
    ParamSet,
    PullResult,
    PushResult,
    RangeParams,
    ServerConfig,
    UsageReport,
    batch_result,
    bundle_result,
    check_append_params,
    encode,
    list_page,
    pull_query,
    pull_result,
    push_result,
    server_config,
    usage_report,
    versions,
)
from pysync.client.transport import document_key
from pysync.client.watch import IDLE_S, ChangesPage, ReconnectingStream, Watch, changes_page
from pysync.errors import NotFound, PysyncError, VersionNotFound
from pysync.protocol import HASH_DIGITS, JSON_TYPE, MAX_HASHED_PAGE_SIZE, MAX_PAGE_SIZE

Entries = list[BatchEntry]
Versions = list[DocumentVersion]
LogSlices = list[list[LogElement] | PysyncError]
"""The elements of each requested log, or the error that a pull would raise."""


class Client(FileMethods):
    """A client of one server. It signs with a key and its certificate, or sends an admin token, or is
    anonymous.

    An async context manager, usable by many tasks at once. Each attempt gets a fresh signature. Pulls, pushes
    and appends are repeated when the connection fails and after 429 and 503. Writes carry an Idempotency-Key,
    so that the server applies them once. Errors are the classes of `pysync.errors`, and `Unreachable` if
    there was no response.
    """

    async def pull(
        self,
        key: str,
        *,
        with_keyring: bool = False,
        since: int | None = None,
        last: int | None = None,
        full: bool = False,
        version: str | None = None,
    ) -> PullResult:
        """Return the document at `key`; an empty one if nothing is stored. With `version`, a hash, return
        that version of it, as far as its `history` is kept; raises VersionNotFound for any other.

        A log is pulled with bounds: the elements after timestamp `since`, the newest `last` of these, or all
        of them with `full`. `PullResult.elements` returns them. Without `full` a server may return no more
        than the log's `maxPullLimit`: with `last` the newest, with `since` alone the oldest and `has_more`. A
        `LogCursor` then pulls the rest.

        Raises ValueError for bounds that every server rejects, for `with_keyring` together with bounds, and
        for a file.
        """
        query = pull_query(since, last, full)
        if with_keyring and query:
            raise ValueError("a log has no keyring: with_keyring excludes since, last and full")
        if with_keyring:
            query = {"withKeyring": "1"}
        if version is not None:
            query["version"] = version
        target = self._target("pull", key)
        pulled = await self._request("GET", f"{target}?{urlencode(query)}" if query else target, pull_result)
        if version not in (None, pulled.hash):  # a server without history ignores the parameter
            raise VersionNotFound
        return pulled

    async def history(self, key: str) -> Versions:
        """Return the versions of the document at `key` that the server keeps, the newest first. The first is
        the current one, unless the document was deleted. Push an old version to restore it."""
        return await self._request("GET", self._target("history", key), versions)

    async def push(
        self,
        key: str,
        data: Mapping[str, Any],
        base_hash: str | None = None,
        *,
        idempotency_key: str | None = None,
        sign_author: bool = False,
        written_ms: int | None = None,
    ) -> PushResult:
        """Replace the document at `key` if its hash is still `base_hash`; create it if `base_hash` is None.

        Raises Conflict with the `current_hash` otherwise, and ValueError for NaN and infinite numbers, which
        JSON lacks. `idempotency_key` defaults to a new one: pass one to repeat a push across restarts of the
        caller. `sign_author` adds a proof of the author. With `written_ms`, the time at which this version
        was written first, it raises Erased if it was erased later.
        """
        members: dict[str, Any] = {"data": orjson.Fragment(encode(data)), "baseHash": base_hash}
        if sign_author:
            members |= _author_proof(self._keys, signing.DOCUMENT_AUTHOR, key, orjson.dumps(members))
        query = "" if written_ms is None else f"?written={written_ms}"
        return await self._push(key, orjson.dumps(members), idempotency_key, query)

    async def delete(self, key: str, base_hash: str, *, idempotency_key: str | None = None) -> PushResult:
        """Remove the document, file or log at `key` if its hash is still `base_hash`, where the collection is
        `deletable`. For a file that is its sha256, for a log the hash of a pull; `""` removes a damaged
        document. Afterwards nothing is stored: the hash of the result is `""`.

        Raises Conflict with the `current_hash` otherwise. `idempotency_key` is as for `push`.
        """
        target = f"{self._target('push', key)}?{urlencode({'baseHash': base_hash})}"
        headers = self._write_headers(idempotency_key)
        del headers["Content-Type"]
        return await self._request("DELETE", target, push_result, headers=headers)

    async def append(
        self,
        key: str,
        data: Mapping[str, Any],
        *,
        ts_ms: int | None = None,
        idempotency_key: str | None = None,
        sign_author: bool | None = None,
    ) -> PushResult:
        """Append `data` to the log at `key` and return the timestamp of the new element. Appends never
        conflict.

        `ts_ms` requests a timestamp; the server rejects it with NonMonotonicTimestamp unless it is greater
        than that of the last element. `idempotency_key` and numbers are as for `push`. `sign_author` adds a
        proof of the author, which most logs require; the default is True if the client has keys. Raises
        AppendLimitExceeded if the log is full.
        """
        keys = self._keys
        if sign_author is None:
            sign_author = keys is not None
        return await self._push(key, _append_body(key, data, ts_ms, keys, sign_author), idempotency_key)

    async def append_anonymous(
        self,
        key: str,
        data: Mapping[str, Any],
        keys: Signer | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> PushResult:
        """Append without the certificate, signature or token of this client. `keys`, which may be created for
        this one element, sign the proof of its author; None adds no proof."""
        body = _append_body(key, data, None, keys, keys is not None)
        return await self._push(key, body, idempotency_key, anonymous=True)

    async def pull_bundle(self, key: str) -> dict[str, PullResult]:
        """Return the members of the bundle at `key` that the caller may read, by name. A member that was
        never written is included, and empty."""
        return await self._request("GET", self._target("pull", key), bundle_result)

    async def batch_pull(
        self,
        names: Sequence[str],
        params: Mapping[str, Sequence[ParamSet]] | None = None,
        append_params: Mapping[str, Sequence[RangeParams | None]] | None = None,
        known: Mapping[str, Sequence[str | None]] | None = None,
    ) -> dict[str, Entries]:
        """Return documents of the collections `names`, read with one request.

        Each collection has one entry for each of its `params`, in their order, or one entry for the caller's
        own document if it has none. An entry is a document, or the error that a single pull would raise.

        Logs need bounds: `append_params` has `since` or `last` or both for each of the `params` of a log; see
        `LogRange`.

        `known` has the hash that the caller has of each of the `params` of a collection, None or `""` for
        none. An entry with this hash is `unchanged`, and has no data.

        Raises TooManyCollections for more names or entries than the server accepts, BatchAppendBudgetExceeded
        for more elements, and ValueError for bounds that every server rejects.
        """
        target = self._selection("/batch/pull", names, params, append_params, known)
        return await self._request("GET", target, batch_result)

    async def batch_pull_many(
        self, name: str, params: Sequence[ParamSet], known: Sequence[str | None] | None = None
    ) -> Entries:
        """Return one entry for each of `params`, all of one collection, as `batch_pull`. An empty `params`
        sends no request."""
        if not params:
            return []
        versions = None if known is None else {name: known}
        target = self._selection("/batch/pull", [name], {name: params}, known=versions)
        return await self._request("GET", target, lambda body: _check_count(body, name, len(params)))

    async def batch_pull_many_append(
        self, name: str, requests: Sequence[LogRange], *, field: str = "items"
    ) -> LogSlices:
        """Return parts of logs of one collection, read with one request: for each of `requests` the elements,
        or the error that a single pull would raise. `field` is as for `PullResult.elements`. An empty
        `requests` sends no request."""

        def slices(body: dict[str, Any]) -> LogSlices:
            entries = _check_count(body, name, len(requests))
            return [entry if isinstance(entry, PysyncError) else entry.elements(field) for entry in entries]

        if not requests:
            return []
        params = {name: [request.params for request in requests]}
        bounds = {name: [request.bounds for request in requests]}
        return await self._request("GET", self._selection("/batch/pull", [name], params, bounds), slices)

    async def list(
        self, prefix: str = "", *, after: str | None = None, page_size: int = MAX_PAGE_SIZE
    ) -> AsyncIterator[str]:
        """Iterate over the values of the last path parameter below `prefix` (`""` for a collection without
        one), in code-point order, after `after`. Each page is requested when it is needed. Names written
        meanwhile may or may not appear."""
        async for name, _ in self._listed(prefix, after, {"limit": page_size}):
            yield name

    def list_hashes(
        self, prefix: str = "", *, after: str | None = None, page_size: int = MAX_HASHED_PAGE_SIZE
    ) -> AsyncIterator[tuple[str, str | None]]:
        """Iterate as `list` does, with the first 16 hex digits of the hash of each name. They are None if the
        server does not know the hash, or does not show it: then `batch_pull` with `known` compares. Raises
        HashesNotAvailable where the server has no hashes for this caller."""
        return self._listed(prefix, after, {"limit": page_size, "hashes": "true"})

    async def _listed(
        self, prefix: str, after: str | None, query: dict[str, str | int]
    ) -> AsyncIterator[tuple[str, str | None]]:
        target = self._target("list", prefix) if prefix else f"{self._prefix}/list"
        has_more = True
        while has_more:
            query |= {} if after is None else {"after": after}
            items, has_more = await self._request("GET", f"{target}?{urlencode(query)}", list_page)
            for item in items:
                yield item
            after = items[-1][0] if items else after

    async def changes(
        self,
        since: str | None = None,
        collections: Sequence[str] | None = None,
        params: Mapping[str, ParamSet] | None = None,
        *,
        limit: int | None = None,
    ) -> ChangesPage:
        """Return the first `limit` documents, logs and files (at most 1000, by default 500) that changed
        after the cursor `since`, each with its latest change. None begins with the oldest; `"now"` returns
        the newest cursor alone. `collections` and `params` are as for `watch`, and a cursor speaks for these
        alone. The id of an event is a cursor, and the cursor of the last page is an `after` of `watch`."""
        target = self._selection("/changes", collections, params, since=since, limit=limit)
        return await self._request("GET", target, changes_page)

    async def change_pages(
        self,
        since: str | None = None,
        collections: Sequence[str] | None = None,
        params: Mapping[str, ParamSet] | None = None,
        *,
        page_size: int | None = None,
    ) -> AsyncIterator[ChangesPage]:
        """Iterate over all pages of `changes` after a cursor, up to the last, which may be a reset. Each is
        requested when it is needed. Store the cursor of a page once its changes have been dealt with."""
        has_more = True
        while has_more:
            page = await self.changes(since, collections, params, limit=page_size)
            yield page
            since, has_more = page.cursor, page.has_more

    def watch(
        self,
        collections: Sequence[str] | None = None,
        params: Mapping[str, ParamSet] | None = None,
        *,
        after: str | None = None,
        idle_s: float = IDLE_S,
        on_disconnect: Callable[[Exception], None] = lambda _: None,
        on_connect: Callable[[], None] = lambda: None,
    ) -> Watch:
        """Return an iterator over writes as they happen, to the collections named, or to all that the caller
        may read. `params` limits some of them to documents with these values of their path parameters. A
        client with a namespace receives changes of that namespace, any other those of the root.

        The watch starts now, or after the `Watch.last_event_id` of an earlier one, and continues without an
        end or a gap. It reconnects when its connection, of which each watch holds one, ends or is silent for
        `idle_s`. It calls `on_disconnect` once with each failure, and `on_connect` when the stream is live.

        Raises the errors with which a server rejects the stream, and Unreachable if the server cannot be
        reached at the start, after as many attempts as other requests.
        """
        return Watch(
            ReconnectingStream(
                connect=partial(self._stream, self._selection("/events", collections, params)),
                last_event_id=after or "",
                idle_s=idle_s,
                on_disconnect=on_disconnect,
                on_connect=on_connect,
                backoff=self.backoff,
                jitter=self._jitter,
                sleep=self._sleep,
            )
        )

    async def server_config(self, headers: Mapping[str, str] | None = None) -> ServerConfig:
        """Return the server's manifest: the collections that it describes to this caller, and with a
        namespace those of that namespace. Raises NotFound if the server has no manifest."""
        return await self._request("GET", f"{self._prefix}/config", server_config, headers=headers)

    async def key_templates(self, collections: Sequence[str]) -> dict[str, str]:
        """Return the key template, such as `notes/{id}`, of each of the collections of which the caller may
        read something. Raises UnknownCollection, and Forbidden or Unauthorized if there is none."""
        target = self._selection("/changes", collections, None, since="now", storagePaths="true")
        return await self._request("GET", target, lambda body: dict(body["storagePaths"]))

    async def revoke(self, revocations: RevocationList) -> int:
        """Publish a revocation list and return its generation. Raises StaleGeneration if the server has this
        generation or a later one. A lost response is not retried, for that reason."""
        headers = {"Content-Type": JSON_TYPE}
        return await self._request(
            "POST",
            "/revocations",
            lambda body: int(body["generation"]),
            revocations.text,
            headers,
            retryable=(),
        )

    async def revocations(self, issuer: str) -> RevocationList | None:
        """Fetch the revocation list that an issuer (user id) has published and verify its signature; None if
        there is none. Raises BadSignature or InvalidRevocation if the server's answer is anything else."""

        def read(body: dict[str, Any]) -> RevocationList:
            return parse_revocation_list(orjson.dumps(body))

        try:
            return await self._request("GET", f"/revocations/{issuer}", read, anonymous=True)
        except NotFound:
            return None

    async def usage(self, spaces: Sequence[str] = ()) -> UsageReport:
        """Return what the caller uses of its quotas, and each of `spaces`, to which it must belong. Raises
        NotFound if the server has no quotas, and Forbidden for a space of others."""
        query = f"?spaces={quote(','.join(spaces), safe=',')}" if spaces else ""
        return await self._request("GET", f"{self._prefix}/usage{query}", usage_report)

    async def health(self) -> dict[str, Any]:
        """Return what the server reports about itself. Unsigned, and tried once."""
        return await self._request("GET", "/health", dict, retryable=())

    async def _push(
        self, key: str, body: bytes, idempotency_key: str | None, query: str = "", *, anonymous: bool = False
    ) -> PushResult:
        target, headers = self._target("push", key) + query, self._write_headers(idempotency_key)
        return await self._request("POST", target, push_result, body, headers, anonymous=anonymous)

    def _selection(
        self,
        path: str,
        names: Sequence[str] | None,
        params: Mapping[str, Any] | None,
        append_params: Mapping[str, Sequence[RangeParams | None]] | None = None,
        known: Mapping[str, Sequence[str | None]] | None = None,
        **plain: str | int | None,
    ) -> str:
        """Return the path with the query that selects documents of the collections `names`."""
        query = {name: str(value) for name, value in plain.items() if value is not None}
        if names is not None:
            query["collections"] = ",".join(names)
        if params:
            query["params"] = encode(params).decode()
        if append_params:
            check_append_params(append_params)
            query["appendParams"] = encode(append_params).decode()
        if known:
            digits = {name: [(hash_ or "")[:HASH_DIGITS] or None for hash_ in known[name]] for name in known}
            query["known"] = encode(digits).decode()
        text = urlencode(query, safe=",:", quote_via=quote)
        return f"{self._prefix}{path}?{text}" if text else f"{self._prefix}{path}"


def _append_body(
    key: str, data: Mapping[str, Any], ts_ms: int | None, keys: Signer | None, sign_author: bool
) -> bytes:
    members: dict[str, Any] = {"data": orjson.Fragment(encode(data))}
    if sign_author:
        members |= _author_proof(keys, signing.APPEND_AUTHOR, key, orjson.dumps(members))
    if ts_ms is not None:
        members["ts"] = ts_ms
    return encode(members)


def _author_proof(keys: Signer | None, tag: str, key: str, body: bytes) -> dict[str, str]:
    """Return the members that prove the author of the `data` in `body`, as the server will store it."""
    if keys is None:
        raise ValueError("an author proof needs keys")
    return signing.sign_author(keys, tag, document_key(key), decode_push(body).data)


def _check_count(body: dict[str, Any], name: str, count: int) -> Entries:
    entries = batch_result(body)[name]
    if len(entries) != count:
        raise ValueError("an entry for each parameter set was asked for")
    return entries


async def fetch_server_config(base_url: str, *, headers: Mapping[str, str] | None = None) -> ServerConfig:
    """Return the manifest of the server at `base_url` for a caller that sends `headers`. The `Authorization`
    of a certificate is enough for a manifest that is filtered by roles. Raises as `Client` does for any
    status but 200."""
    async with Client(base_url) as client:
        return await client.server_config(headers)


class SpacesAccess(dict[str, dict[str, Any]]):
    """The data of access documents by the id of their space. `errors` has the reason for each space that
    could not be read: Forbidden if the caller is not a member, NotFound if nothing is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, PysyncError] = {}


async def read_spaces_access(
    client: Client, space_ids: Sequence[str], *, collection: str = "spaceaccess", param: str = "spaceId"
) -> SpacesAccess:
    """Return the access documents of the spaces `space_ids` that the caller of `client` may read.

    Raises as `Client.batch_pull` if the whole request fails.
    """
    access = SpacesAccess()
    entries = await client.batch_pull_many(collection, [{param: space_id} for space_id in space_ids])
    for space_id, entry in zip(space_ids, entries, strict=True):
        if isinstance(entry, PysyncError):
            access.errors[space_id] = entry
        elif not entry.hash:
            access.errors[space_id] = NotFound()
        else:
            access[space_id] = entry.data
    return access
