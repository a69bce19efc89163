"""The calls of the protocol (clients-and-crypto 6.2)."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import orjson

from pysync import signing, wire
from pysync._core import decode_push
from pysync.caps import RevocationList
from pysync.client.connection import Connection
from pysync.client.results import (
    BatchEntry,
    PullResult,
    PushResult,
    ServerConfig,
    batch_result,
    bundle_result,
    page,
    pull_result,
    push_result,
    server_config,
)

MAX_PAGE = 1000

ParamSet = Mapping[str, str | int]
Entries = list[BatchEntry]


class Client(Connection):
    """One server, and who speaks to it: a key with its certificate, an admin token, or nobody.

    An async context manager; usable by many tasks at once. Every attempt is signed afresh. Pulls and pushes
    are repeated when the connection fails and on 429 and 503; a push carries an Idempotency-Key, so that the
    server applies it once. Refusals are the classes of `pysync.errors`, and `Unreachable` where none came.
    """

    async def pull(self, key: str, *, with_keyring: bool = False) -> PullResult:
        """The document at `key`, empty where nothing is stored."""
        query = "?withKeyring=1" if with_keyring else ""
        return await self._repeat("GET", self._target("pull", key) + query, pull_result)

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

        Raises Conflict, with the `current_hash`, otherwise. `idempotency_key` is made up unless given: give
        one to repeat a push across restarts of the caller. `sign_author` proves to readers who wrote it.
        """
        body = orjson.dumps({"data": data, "baseHash": base_hash})
        if sign_author:
            body = orjson.dumps({"data": data, "baseHash": base_hash, **self._author_proof(key, body)})
        headers = {
            "Content-Type": "application/json",
            wire.HEADER_IDEMPOTENCY_KEY: idempotency_key or self._random(16).hex(),
        }
        return await self._repeat("POST", self._target("push", key), push_result, body, headers)

    async def pull_bundle(self, key: str) -> dict[str, PullResult]:
        """The members of the bundle at `key` that the caller may read, by their names; a member that was
        never written is there and empty."""
        return await self._repeat("GET", self._target("pull", key), bundle_result)

    async def batch_pull(
        self, names: Sequence[str], params: Mapping[str, Sequence[ParamSet]] | None = None
    ) -> dict[str, Entries]:
        """Documents of the collections `names`, in one request: for each the entries of its `params`, in
        their order; one where it has none, of the caller's own. An entry is a document, or the refusal that a
        pull of it would raise.

        Raises TooManyCollections for more names, or entries, than the server takes at once.
        """
        return await self._repeat("GET", self._batch_target(names, params or {}), batch_result)

    async def batch_pull_many(self, name: str, params: Sequence[ParamSet]) -> Entries:
        """`batch_pull` of one collection: an entry for each of `params`. None of them asks for nothing."""

        def aligned(answer: dict[str, Any]) -> Entries:
            entries = batch_result(answer)[name]
            if len(entries) != len(params):
                raise ValueError("an entry for each parameter set was asked for")
            return entries

        if not params:
            return []
        return await self._repeat("GET", self._batch_target([name], {name: params}), aligned)

    async def list(
        self, prefix: str = "", *, after: str | None = None, page_size: int = MAX_PAGE
    ) -> AsyncIterator[str]:
        """The values of the last parameter below `prefix` (`""`: of a collection without one), in code-point
        order, those greater than `after`; from all pages, each asked for when it is needed. What is written
        meanwhile may or may not be met."""
        target = self._target("list", prefix) if prefix else f"{self._prefix}/list"
        has_more = True
        while has_more:
            query = {"limit": page_size} if after is None else {"limit": page_size, "after": after}
            names, has_more = await self._repeat("GET", f"{target}?{urlencode(query)}", page)
            for name in names:
                yield name
            after = names[-1] if names else after

    async def server_config(self, headers: Mapping[str, str] | None = None) -> ServerConfig:
        """What the server tells this caller of its collections; with a namespace, of that namespace's.
        Raises NotFound where it tells nobody."""
        return await self._repeat("GET", f"{self._prefix}/config", server_config, headers=headers)

    async def revoke(self, revocations: RevocationList) -> int:
        """Publish a revocation list and return its generation. Raises StaleGeneration where the server knows
        this one or a later one; a lost answer is not retried, for that reason."""
        headers = {"Content-Type": "application/json"}
        return await self._attempt(
            "POST", "/revocations", lambda answer: int(answer["generation"]), revocations.text, headers
        )

    async def health(self) -> dict[str, Any]:
        """What the server says of itself. Unsigned, and tried once."""
        return await self._attempt("GET", "/health", lambda answer: answer)

    def _target(self, action: str, key: str) -> str:
        return f"{self._prefix}/{action}/{quote(_document_key(key), safe='/:@')}"

    def _batch_target(self, names: Sequence[str], params: Mapping[str, Sequence[ParamSet]]) -> str:
        query = {"collections": ",".join(names)}
        if params:
            query["params"] = orjson.dumps(params).decode()
        return f"{self._prefix}/batch/pull?{urlencode(query, safe=',:', quote_via=quote)}"

    def _author_proof(self, key: str, body: bytes) -> dict[str, str]:
        if self._keys is None:
            raise ValueError("an author proof needs keys")
        data = decode_push(body).data
        return signing.sign_author(self._keys, signing.DOCUMENT_AUTHOR, _document_key(key), data)


def _document_key(key: str) -> str:
    """The key of a document, also from the paths that other clients of the protocol take."""
    return key.removeprefix("/pull/").removeprefix("/push/")


async def fetch_server_config(base_url: str, *, headers: Mapping[str, str] | None = None) -> ServerConfig:
    """What the server at `base_url` tells of its collections to whoever sends `headers`: a certificate's
    `Authorization` is enough where it is filtered by roles. Raises as `Client` does for anything but 200."""
    async with Client(base_url) as client:
        return await client.server_config(headers)
