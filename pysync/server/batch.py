"""`GET {ns}/batch/pull`: many documents and logs of one namespace in one answer (wire section 6)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import orjson
from aiohttp import web

from pysync import _core, fields, wire
from pysync.access import ANYBODY, Verified
from pysync.applog import Bounds, Logs
from pysync.batch import Outcome, Read, read_each
from pysync.config import Config
from pysync.config.template import document_key, params
from pysync.errors import (
    AuthorizationError,
    DocumentCorrupt,
    Forbidden,
    PysyncError,
    RolesUnavailable,
)
from pysync.model import ANONYMOUS, Caller
from pysync.plugins.hooks import Hooks
from pysync.rule import Rule
from pysync.server.answer import Answer, version_matches
from pysync.server.callers import Callers
from pysync.server.roles import Roles, request_of
from pysync.server.routes import Match
from pysync.server.tails import Tails, Told, max_elements
from pysync.spaces import with_roles
from pysync.store import READS_AT_ONCE, Store

IN_THREAD_ABOVE = 64 * 1024
"""Bytes of documents that are rewritten beside the event loop."""


class _Verdict(NamedTuple):
    """What a group of entries gets: the text of a refusal, or documents without the members `hidden`."""

    refusal: str | None
    hidden: frozenset[str] = frozenset()


_Tail = tuple[str, int, int | None, int | None, int | None]
"""A log to read, as a plan tells it: key, group, and the bounds."""

_Group = tuple[int, str | None, list[str]]
"""Entries that are decided on together, as a plan tells them: their collection, the `{identity}` of their
paths, and the values of the parameters that decide."""

_ADMITTED = _Verdict(None)
_FORBIDDEN = _Verdict(Forbidden.text)
_UNKNOWN = _Verdict(AuthorizationError.text)


class BatchPull:
    """The batch pulls of one `namespace`. `rules` are those of pulling its collections, each with whether
    batches serve it; `reads_at_once` bounds the reads of one request that wait for the store together."""

    def __init__(
        self,
        config: Config,
        namespace: str | None,
        rules: Sequence[tuple[Rule, bool]],
        store: Store,
        logs: Logs,
        callers: Callers,
        roles: Roles,
        hooks: Hooks,
        now_ms: Callable[[], int],
        reads_at_once: int = READS_AT_ONCE,
    ) -> None:
        self._namespace = namespace
        self._rules = [rule for rule, _ in rules]
        self._store = store
        self._tails = Tails(logs, self._rules)
        self._callers = callers
        self._roles = roles
        self._spaces = roles.spaces
        self._hooks = hooks
        self._asks = hooks.authorizes or hooks.pulls
        self._now_ms = now_ms
        self._reads_at_once = reads_at_once
        self._deciding = [
            list(params(rule.collection.storage_path)) if self._asks else self._spaces.params(rule)
            for rule in self._rules
        ]
        self._planner = _core.BatchPlanner(
            [
                (rule.collection.name, rule.collection.storage_path, served, rule.examines,
                 rule.collection.ttl_ms, deciding, max_elements(rule))
                for (rule, served), deciding in zip(rules, self._deciding, strict=True)
            ],
            config.max_collections_per_batch,
            config.max_batch_append_elements,
            list(config.batch_key_deny_suffixes),
        )  # fmt: skip

    async def pull(self, request: web.BaseRequest, match: Match) -> Answer:
        """Answer a batch pull. The entries' errors are theirs alone; what the request as a whole did wrong is
        told before anything is read."""
        query = request.raw_path.partition("?")[2].encode(errors="surrogateescape")
        verified = await self._callers.claimed(request, self._namespace)
        return await self._answer(request, query, verified)

    async def _answer(self, request: web.BaseRequest, query: bytes, verified: Verified) -> Answer:
        """The answer for whoever sends the request: for anybody, where the credentials turn out not to hold.
        The nonce is taken once something is allowed, or before plugins are asked that may act on it."""
        caller = verified.caller
        plan = self._planner.plan(query, caller.identity, caller.scope)
        named = [self._rules[row] for row in plan.collections]
        await self._callers.meter(request, caller, named)
        if self._hooks.pulls and not await self._callers.holds(verified):
            return await self._answer(request, query, ANYBODY)
        known = await self._read_access(plan, caller)
        verdicts = await self._verdicts(plan, caller, known)
        is_taken = self._hooks.pulls or all(verdict.refusal is not None for verdict in verdicts)
        if not is_taken and not await self._callers.holds(verified):
            return await self._answer(request, query, ANYBODY)
        tails = plan.tails if any(rule.collection.append_only is not None for rule in named) else []
        answer = await self._read(plan, tails, verdicts, known)
        version = answer.etag
        headers = f'{_cache_lines(named, caller, answer)}ETag: W/"{version}"\r\n'
        if version_matches(request.headers.get(wire.HEADER_IF_NONE_MATCH), version):
            return Answer(304, b"", headers)
        return Answer(200, answer.body(), headers)

    async def _read_access(self, plan: _core.BatchPlan, caller: Caller) -> dict[str, Outcome]:
        """The access documents of the spaces that the plan's groups belong to."""
        if not caller.identity or not any(self._rules[row].by_space for row in plan.collections):
            return {}
        keys = {key for group in plan.groups if (key := self._access_key(group)) is not None}
        return await read_each(self._store, keys, at_once=self._reads_at_once)

    def _access_key(self, group: _Group) -> str | None:
        row, _, values = group
        if not (self._rules[row].by_space and self._rules[row].examines):
            return None
        return self._spaces.key(dict(zip(self._deciding[row], values, strict=True)))

    async def _verdicts(
        self, plan: _core.BatchPlan, caller: Caller, access: dict[str, Outcome]
    ) -> list[_Verdict]:
        """What single pulls would get, for each group of the plan."""
        if self._asks:
            return await asyncio.gather(*(self._ask(group, caller, access) for group in plan.groups))
        caller = replace(caller, scope=None)  # the plan saw to it
        verdicts = []
        for group in plan.groups:
            row, identity, _ = group
            reader = self._in_space(group, caller, access)
            verdicts.append(_UNKNOWN if reader is None else _decide(self._rules[row], reader, identity, ""))
        return verdicts

    async def _ask(self, group: _Group, caller: Caller, access: dict[str, Outcome]) -> _Verdict:
        """The verdict on a group, which is one document, once plugins have been asked."""
        row, identity, values = group
        rule = self._rules[row]
        reader = self._in_space(group, caller if rule.examines else ANONYMOUS, access)
        if reader is None:
            return _UNKNOWN
        path_params = dict(zip(self._deciding[row], values, strict=True))
        key = document_key(rule.collection.storage_path.split("/"), path_params)
        try:
            reader = await self._roles.by_plugins(rule, reader, path_params, key)
            verdict = _decide(rule, reader, identity, key)
            if verdict.refusal is None and self._hooks.pulls:
                await self._hooks.leave(request_of(rule, reader, path_params, key))
        except RolesUnavailable:
            return _UNKNOWN
        except PysyncError as error:
            return _Verdict(error.message)
        return verdict

    def _in_space(self, group: _Group, caller: Caller, access: dict[str, Outcome]) -> Caller | None:
        """`caller` with its roles in the group's space; None where they could not be read."""
        rule = self._rules[group[0]]
        if (
            rule.by_space
            and rule.examines
            and caller.identity
            and (key := self._access_key(group)) is not None
        ):
            stored = access[key]
            if isinstance(stored, str):
                return None
            return with_roles(caller, self._spaces.roles(stored, caller.identity))
        return caller

    async def _read(
        self, plan: _core.BatchPlan, tails: list[_Tail], verdicts: list[_Verdict], known: dict[str, Outcome]
    ) -> _core.BatchAnswer:
        """The answer, `known` being read already. Refused entries cost no read."""
        reads = plan.reads
        foreign = self._foreign(plan, reads + [tail[:2] for tail in tails] if tails else reads)
        wanted = {
            key
            for key, group in reads
            if verdicts[group].refusal is None and key not in known and (key, group) not in foreign
        }
        told: list[Told] = []
        beside = self._tail_reads(plan, tails, verdicts, foreign, told) if tails else []
        found = await read_each(self._store, wanted, beside, at_once=self._reads_at_once)
        if known:
            found |= known
        if not foreign and all(verdict is _ADMITTED for verdict in verdicts):
            return plan.answer([found[key] for key, _ in reads], self._now_ms(), None, told)

        def visible() -> list[Outcome]:
            return [
                Forbidden.text if (key, group) in foreign else _visible(found.get(key), verdicts[group])
                for key, group in reads
            ]

        size = sum(len(body) for body in found.values() if isinstance(body, bytes))
        stored = await asyncio.to_thread(visible) if size > IN_THREAD_ABOVE else visible()
        hidden = [sorted(verdict.hidden) for verdict in verdicts]
        return plan.answer(stored, self._now_ms(), orjson.dumps(hidden), told)

    def _tail_reads(
        self,
        plan: _core.BatchPlan,
        tails: list[_Tail],
        verdicts: list[_Verdict],
        foreign: frozenset[tuple[str, int]],
        told: list[Told],
    ) -> list[Read]:
        """The reads after which `told` says what became of each of `tails`."""

        async def read(at: int, row: int, key: str, bounds: Bounds, hidden: frozenset[str]) -> None:
            told[at] = await self._tails.read(row, key, bounds, hidden)

        rows = [row for row, _, _ in plan.groups]
        reads: list[Read] = []
        for key, group, *bounds in tails:
            refusal, hidden = verdicts[group]
            if (key, group) in foreign:
                refusal = Forbidden.text
            if refusal is None:
                reads.append(partial(read, len(told), rows[group], key, Bounds(*bounds), hidden))
            told.append(refusal or "")
        return reads

    def _foreign(self, plan: _core.BatchPlan, reads: Sequence[tuple[str, int]]) -> frozenset[tuple[str, int]]:
        """The reads whose key is another collection's: a single pull of it would ask for that one's roles."""
        if not any(self._rules[row].rivals for row in plan.collections):
            return frozenset()
        rows = [row for row, _, _ in plan.groups]
        return frozenset((key, group) for key, group in reads if not self._rules[rows[group]].owns(key))


def _decide(rule: Rule, reader: Caller, identity: str | None, key: str) -> _Verdict:
    """What single pulls of a group would get."""
    if not rule.answers(reader, identity, key):
        return _FORBIDDEN
    permissions = rule.collection.field_permissions
    if not permissions:
        return _ADMITTED
    hidden = fields.hidden(permissions, rule.roles_of(reader, identity))
    return _Verdict(None, hidden) if hidden else _ADMITTED


def _cache_lines(named: list[Rule], caller: Caller, answer: _core.BatchAnswer) -> str:
    """Wire section 4, of all entries together: the shortest age, and public where every entry is, whoever
    asks."""
    private = answer.failed or any(
        "public" not in rule.roles
        or rule.examines
        or (bool(caller.identity) and rule.identity_index is not None)
        for rule in named
    )
    ages_ms = [rule.collection.cache_duration_ms for rule in named]
    known_ms = [age_ms for age_ms in ages_ms if age_ms is not None]
    if answer.failed or len(known_ms) < len(ages_ms):
        control = "private, no-cache" if private else "no-cache"
    else:
        control = f"{'private' if private else 'public'}, max-age={min(known_ms) // 1000}"
    return f"Cache-Control: {control}\r\nVary: Authorization\r\n"


def _visible(stored: Outcome, verdict: _Verdict) -> Outcome:
    """What a caller with this verdict gets to see of what is stored."""
    if verdict.refusal is not None:
        return verdict.refusal
    if not verdict.hidden or not isinstance(stored, bytes):
        return stored
    try:
        return _without(_core.read_document(stored), verdict.hidden)
    except DocumentCorrupt:
        return DocumentCorrupt.text


def _without(document: _core.Document, hidden: frozenset[str]) -> bytes:
    """The document as it would be stored without these members of its data."""
    members: dict[str, object] = {"ts": document.ts_ms, "hash": document.hash}
    if document.author_pubkey is not None and document.author_signature is not None:
        members |= {"authorPubkey": document.author_pubkey, "authorSignature": document.author_signature}
    data = fields.without(document.data, hidden)
    return orjson.dumps(members | {"data": orjson.Fragment(data)})
