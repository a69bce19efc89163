"""The calls of the protocol (clients-and-crypto 6.2).

How a request names the part of a log that it asks for (wire sections 5 and 6).

Access to many spaces, told in one request (clients-and-crypto section 7.3).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    LogElement,
    PullResult,
    PushResult,
    ServerConfig,
    batch_result,
    bundle_result,
    encode,
    list_page,
    pull_result,
    push_result,
    server_config,
)
from pysync.client.transport import document_key
from pysync.client.watch import IDLE_S, ReconnectingStream, Watch
from pysync.errors import NotFound, PysyncError

ParamSet = Mapping[str, str | int]
RangeParams = Mapping[str, int]
"""Of one log in a batch: `since` or `last` or both."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """The part of a log that a batch is to read: the log's path parameters, and `since` or `last` or both, as
    for `Client.pull`. With `since` alone a server gives the *oldest* elements above it, as many as it gives
    at once (its `maxPullLimit`, or 1000): ask again, since the newest of them, until none come."""

    params: ParamSet = field(default_factory=dict)
    since: int | None = None
    last: int | None = None

    @property
    def bounds(self) -> RangeParams:
        named = {"since": self.since, "last": self.last}
        return {name: value for name, value in named.items() if value is not None}


def pull_query(since: int | None, last: int | None, full: bool) -> dict[str, str]:
    """The query of a single pull; empty without bounds. Raises ValueError for what no server takes."""
    if full and (since is not None or last is not None):
        raise ValueError("full is all of a log: it excludes since and last")
    _check("since", since)
    _check("last", last)
    query = {"checkpoint": since, "last": last, "full": "true" if full else None}
    return {name: str(value) for name, value in query.items() if value is not None}


def check_append_params(append_params: Mapping[str, Sequence[RangeParams | None]]) -> None:
    """Raises ValueError for what no server takes."""
    for bounds in append_params.values():
        for entry in bounds:
            for name, value in (entry or {}).items():
                if name not in ("since", "last", "limit"):
                    raise ValueError(f"in a batch since and last bound a log, not {name}")
                _check(name, value)


def _check(name: str, value: int | None) -> None:
    # A bool is an int to Python and none to a server.
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{name} must be a whole number, 0 or more")


MAX_PAGE_SIZE = 1000

Entries = list[BatchEntry]
LogSlices = list[list[LogElement] | PysyncError]
"""For each log that was asked for its elements, or the refusal that a pull would raise."""


class Client(FileMethods):
    """One server, and who speaks to it: a key with its certificate, an admin token, or nobody.

    An async context manager; usable by many tasks at once. Every attempt is signed afresh. Pulls, pushes and
    appends are repeated when the connection fails and on 429 and 503; what writes carries an Idempotency-Key,
    so that the server applies it once. Refusals are the classes of `pysync.errors`, and `Unreachable` where
    none came.
    """

    async def pull(
        self,
        key: str,
        *,
        with_keyring: bool = False,
        since: int | None = None,
        last: int | None = None,
        full: bool = False,
    ) -> PullResult:
        """The document at `key`, empty where nothing is stored.

        A log is pulled with bounds, and `PullResult.elements` are its elements: those with a time above
        `since`, of those the newest `last`, or `full`: all. Without `full` a server may give no more than the
        log's `maxPullLimit`: of `last` the newest, of `since` alone the oldest, with `has_more`, so that
        asking again, since the newest of them, misses none: a `LogCursor` does.

        Raises ValueError for bounds that no server takes, for `with_keyring` beside them, and for a file.
        """
        query = pull_query(since, last, full)
        if with_keyring and query:
            raise ValueError("a log has no keyring: with_keyring excludes since, last and full")
        if with_keyring:
            query = {"withKeyring": "1"}
        target = self._target("pull", key)
        return await self._request("GET", f"{target}?{urlencode(query)}" if query else target, pull_result)

    async def push(
        self,
        key: str,
        data: Mapping[str, Any],
        base_hash: str | None = None,
        *,
        idempotency_key: str | None = None,
        sign_author: bool = False,
    ) -> PushResult:
        """Replace the document at `key`, if it is still at `base_hash`; None: if nothing is stored there.

        Raises Conflict, with the `current_hash`, otherwise, and ValueError for NaN and infinite numbers,
        which JSON lacks. `idempotency_key` is made up unless given: give one to repeat a push across
        restarts of the caller. `sign_author` proves to readers who wrote it.
        """
        members: dict[str, Any] = {"data": orjson.Fragment(encode(data)), "baseHash": base_hash}
        if sign_author:
            members |= _author_proof(self._keys, signing.DOCUMENT_AUTHOR, key, orjson.dumps(members))
        body = orjson.dumps(members)
        headers = self._write_headers(idempotency_key)
        return await self._request("POST", self._target("push", key), push_result, body, headers)

    async def append(
        self,
        key: str,
        data: Mapping[str, Any],
        *,
        ts_ms: int | None = None,
        idempotency_key: str | None = None,
        sign_author: bool | None = None,
    ) -> PushResult:
        """Append `data` to the log at `key`: the answer tells the time that it got. Appends never conflict.

        `ts_ms` asks for a time of the caller's own: NonMonotonicTimestamp unless it is greater than the last
        element's. `idempotency_key`, and what is no JSON, are as for `push`. `sign_author` proves who wrote
        the element, as most logs require; None: where the client has keys. Raises AppendLimitExceeded where
        the log is full.
        """
        keys = self._keys
        if sign_author is None:
            sign_author = keys is not None
        body = _append_body(key, data, ts_ms, keys, sign_author)
        headers = self._write_headers(idempotency_key)
        return await self._request("POST", self._target("push", key), push_result, body, headers)

    async def append_anonymous(
        self,
        key: str,
        data: Mapping[str, Any],
        keys: Signer | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> PushResult:
        """`append` as nobody: no certificate, signature or token of this client goes along. `keys`, which may
        be made for this one element, prove that who wrote it holds them; None: no proof."""
        body = _append_body(key, data, None, keys, keys is not None)
        headers = self._write_headers(idempotency_key)
        target = self._target("push", key)
        return await self._request("POST", target, push_result, body, headers, anonymous=True)

    async def pull_bundle(self, key: str) -> dict[str, PullResult]:
        """The members of the bundle at `key` that the caller may read, by their names; a member that was
        never written is there and empty."""
        return await self._request("GET", self._target("pull", key), bundle_result)

    async def batch_pull(
        self,
        names: Sequence[str],
        params: Mapping[str, Sequence[ParamSet]] | None = None,
        append_params: Mapping[str, Sequence[RangeParams | None]] | None = None,
    ) -> dict[str, Entries]:
        """Documents of the collections `names`, in one request: for each the entries of its `params`, in
        their order; one where it has none, of the caller's own. An entry is a document, or the refusal that a
        pull of it would raise.

        Logs want bounds: `append_params` has, for each of the `params` of a log, `since` or `last` or both
        (`LogRange` says what they give).

        Raises TooManyCollections for more names, or entries, than the server takes at once,
        BatchAppendBudgetExceeded for more elements, and ValueError for bounds that no server takes.
        """
        target = self._batch_target(names, params or {}, append_params or {})
        return await self._request("GET", target, batch_result)

    async def batch_pull_many(self, name: str, params: Sequence[ParamSet]) -> Entries:
        """`batch_pull` of one collection: an entry for each of `params`. None of them asks for nothing."""

        if not params:
            return []
        target = self._batch_target([name], {name: params})
        return await self._request("GET", target, lambda answer: _check_count(answer, name, len(params)))

    async def batch_pull_many_append(
        self, name: str, requests: Sequence[LogRange], *, field: str = "items"
    ) -> LogSlices:
        """Parts of logs of one collection, in one request: for each of `requests` the elements, or the
        refusal that a pull would raise. `field` is as for `PullResult.elements`. None of them asks for
        nothing."""

        def tails(answer: dict[str, Any]) -> LogSlices:
            entries = _check_count(answer, name, len(requests))
            return [entry if isinstance(entry, PysyncError) else entry.elements(field) for entry in entries]

        if not requests:
            return []
        params = {name: [request.params for request in requests]}
        bounds = {name: [request.bounds for request in requests]}
        return await self._request("GET", self._batch_target([name], params, bounds), tails)

    async def list(
        self, prefix: str = "", *, after: str | None = None, page_size: int = MAX_PAGE_SIZE
    ) -> AsyncIterator[str]:
        """The values of the last parameter below `prefix` (`""`: of a collection without one), in code-point
        order, those greater than `after`; from all pages, each asked for when it is needed. What is written
        meanwhile may or may not be met."""
        target = self._target("list", prefix) if prefix else f"{self._prefix}/list"
        has_more = True
        while has_more:
            query = {"limit": page_size} if after is None else {"limit": page_size, "after": after}
            names, has_more = await self._request("GET", f"{target}?{urlencode(query)}", list_page)
            for name in names:
                yield name
            after = names[-1] if names else after

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
        """Each write to the collections named, as it is made; None: to all that the caller may read. `params`
        narrows some of them to the documents with these values of their path's parameters. A client with a
        namespace hears of that one alone, others of the root's collections.

        It begins now, or `after` an earlier `Watch.place`, and goes on without end or gap: when its
        connection ends, or says nothing for `idle_s`, it makes another after a while (`retry:` and
        `Retry-After` say how long, else the client's backoff). `on_disconnect` is told why, once each time,
        and `on_connect` when it is there, or there again. A refusal is raised, and so is a server that cannot
        be reached from the beginning, after as many attempts as for other requests.

        Each watch holds a connection; one is enough for any number of collections.
        """
        return Watch(
            ReconnectingStream(
                partial(self._stream, self._events_target(collections, params)),
                after=after,
                idle_s=idle_s,
                on_disconnect=on_disconnect,
                on_connect=on_connect,
                backoff=self._backoff,
                jitter=self._jitter,
                sleep=self._sleep,
            )
        )

    async def server_config(self, headers: Mapping[str, str] | None = None) -> ServerConfig:
        """What the server tells this caller of its collections; with a namespace, of that namespace's.
        Raises NotFound where it tells nobody."""
        return await self._request("GET", f"{self._prefix}/config", server_config, headers=headers)

    async def revoke(self, revocations: RevocationList) -> int:
        """Publish a revocation list and return its generation. Raises StaleGeneration where the server knows
        this one or a later one; a lost answer is not retried, for that reason."""
        headers = {"Content-Type": "application/json"}
        return await self._request_once(
            "POST", "/revocations", lambda answer: int(answer["generation"]), revocations.text, headers
        )

    async def revocations(self, issuer: str) -> RevocationList | None:
        """Fetch the revocation list that an issuer (user id) has published and verify its signature; None if
        there is none. Raises BadSignature or InvalidRevocation if the server's answer is anything else."""

        def read(answer: dict[str, Any]) -> RevocationList:
            return parse_revocation_list(orjson.dumps(answer))

        try:
            return await self._request("GET", f"/revocations/{issuer}", read, anonymous=True)
        except NotFound:
            return None

    async def health(self) -> dict[str, Any]:
        """What the server says of itself. Unsigned, and tried once."""
        return await self._request_once("GET", "/health", lambda answer: answer)

    def _events_target(self, collections: Sequence[str] | None, params: Mapping[str, ParamSet] | None) -> str:
        query = {} if collections is None else {"collections": ",".join(collections)}
        if params:
            query["params"] = encode(params).decode()
        return f"{self._prefix}/events?{_encoded(query)}" if query else f"{self._prefix}/events"

    def _batch_target(
        self,
        names: Sequence[str],
        params: Mapping[str, Sequence[ParamSet]],
        append_params: Mapping[str, Sequence[RangeParams | None]] | None = None,
    ) -> str:
        query = {"collections": ",".join(names)}
        if params:
            query["params"] = encode(params).decode()
        if append_params:
            check_append_params(append_params)
            query["appendParams"] = encode(append_params).decode()
        return f"{self._prefix}/batch/pull?{_encoded(query)}"


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
    """The members that prove who wrote the `data` of `body`, as the server will store it."""
    if keys is None:
        raise ValueError("an author proof needs keys")
    return signing.sign_author(keys, tag, document_key(key), decode_push(body).data)


def _check_count(answer: dict[str, Any], name: str, count: int) -> Entries:
    entries = batch_result(answer)[name]
    if len(entries) != count:
        raise ValueError("an entry for each parameter set was asked for")
    return entries


def _encoded(query: Mapping[str, str]) -> str:
    return urlencode(query, safe=",:", quote_via=quote)


async def fetch_server_config(base_url: str, *, headers: Mapping[str, str] | None = None) -> ServerConfig:
    """What the server at `base_url` tells of its collections to whoever sends `headers`: a certificate's
    `Authorization` is enough where it is filtered by roles. Raises as `Client` does for anything but 200."""
    async with Client(base_url) as client:
        return await client.server_config(headers)


class SpacesAccess(dict[str, dict[str, Any]]):
    """The data of access documents by the id of their space. A space that could not be read is not in it;
    `errors` says why: Forbidden for one that the caller is no member of, NotFound where none is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, PysyncError] = {}


async def read_spaces_access(
    client: Client, space_ids: Sequence[str], *, collection: str = "spaceaccess", param: str = "spaceId"
) -> SpacesAccess:
    """The access documents of the spaces `space_ids`, as far as the caller of `client` may read them.

    Raises what `Client.batch_pull` does where the request as a whole fails.
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
