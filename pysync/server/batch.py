"""`GET {ns}/batch/pull`: many documents and logs of one namespace in one answer (wire section 6)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from aiohttp import web

from pysync import _core, protocol
from pysync.auth import field_permissions
from pysync.auth.authentication import ANYBODY, Verified
from pysync.auth.policy import Rule
from pysync.auth.spaces import with_roles
from pysync.batch import Outcome, read_each
from pysync.config import Config
from pysync.config.key_templates import document_key, params
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import Logs
from pysync.engine.documents import Documents
from pysync.errors import (
    AuthorizationError,
    Forbidden,
    PysyncError,
    RolesUnavailable,
)
from pysync.model import ANONYMOUS, Caller
from pysync.plugins.hooks import Hooks
from pysync.server.answer import Answer, HeadAnswer, version_matches, wants_body
from pysync.server.batch_reads import ADMITTED, Reads, Verdict
from pysync.server.callers import Callers
from pysync.server.roles import Roles, request_of
from pysync.server.routes import Match
from pysync.server.tails import Tails, max_elements
from pysync.store import READS_AT_ONCE, Store

_Group = tuple[int, str | None, list[str]]
"""Entries that are decided on together, as a plan tells them: their collection, the `{identity}` of their
paths, and the values of the parameters that decide."""

_FORBIDDEN = Verdict(Forbidden.text)
_UNKNOWN = Verdict(AuthorizationError.text)


class BatchPull:
    """The batch pulls of one `namespace`. `rules` are those of pulling its collections, each with whether
    batches serve it; `reads_at_once` bounds the reads of one request that wait for the store together."""

    def __init__(
        self,
        config: Config,
        namespace: str | None,
        rules: Sequence[tuple[Rule, bool]],
        store: Store,
        documents: Documents,
        logs: Logs,
        callers: Callers,
        roles: Roles,
        hooks: Hooks,
        now_ms: Callable[[], int],
        corruption: CorruptionReporter,
        reads_at_once: int = READS_AT_ONCE,
    ) -> None:
        self._namespace = namespace
        self._rules = [rule for rule, _ in rules]
        self._store = store
        self._documents = documents
        self._max_bytes = config.max_batch_bytes
        self._tails = Tails(logs, self._rules, documents.versions)
        self._callers = callers
        self._roles = roles
        self._spaces = roles.spaces
        self._hooks = hooks
        self._asks = hooks.authorizes or hooks.pulls
        self._now_ms = now_ms
        self._corruption = corruption
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
            [suffix.lstrip("/") for suffix in config.batch_key_deny_suffixes],
        )  # fmt: skip

    async def pull(self, request: web.BaseRequest, match: Match) -> Answer:
        """Answer a batch pull. The entries' errors are theirs alone; what the request as a whole did wrong is
        told before anything is read."""
        query = request.raw_path.partition("?")[2].encode(errors="surrogateescape")
        verified = await self._callers.claimed(request, self._namespace)
        return await self._answer(request, query, verified)

    async def _answer(self, request: web.BaseRequest, query: bytes, verified: Verified) -> Answer:
        """Answer the request; as anonymous if its credentials are not valid. The nonce is taken once
        something is allowed, or before plugins are asked that may act on it."""
        caller = verified.caller
        plan = self._planner.plan(query, caller.identity, caller.scope)
        named = [self._rules[row] for row in plan.collections]
        await self._callers.meter(request, caller, named)
        if self._hooks.pulls and not await self._callers.holds(request, verified):
            return await self._answer(request, query, ANYBODY)
        known = await self._read_access(plan, caller)
        verdicts = await self._verdicts(plan, caller, known)
        is_taken = self._hooks.pulls or all(verdict.refusal is not None for verdict in verdicts)
        if not is_taken and not await self._callers.holds(request, verified):
            return await self._answer(request, query, ANYBODY)
        reads = Reads(
            self._store, self._documents, self._tails, plan, verdicts, self._foreign(plan), known,
            self._max_bytes, self._reads_at_once, self._corruption,
        )  # fmt: skip
        await reads.begin(wants_body=wants_body(request))
        if not wants_body(request):
            answer = await reads.version(self._now_ms())
            headers = _headers(named, caller, answer)
            if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), answer.etag):
                return Answer(304, b"", headers)
            if request.method == "HEAD":
                await reads.weigh()
                return HeadAnswer(headers)
        answer = await reads.whole(self._now_ms())
        return Answer(200, await reads.body(answer), _headers(named, caller, answer))

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
    ) -> list[Verdict]:
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

    async def _ask(self, group: _Group, caller: Caller, access: dict[str, Outcome]) -> Verdict:
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
            return Verdict(error.message)
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
            membership = None if isinstance(stored, str) else self._spaces.membership(key, stored)
            if membership is None:
                return None
            return with_roles(caller, membership.roles(caller.identity))
        return caller

    def _foreign(self, plan: _core.BatchPlan) -> frozenset[tuple[str, int]]:
        """The reads whose key is another collection's: a single pull of it would ask for that one's roles."""
        if not any(self._rules[row].rivals for row in plan.collections):
            return frozenset()
        rows = [row for row, _, _ in plan.groups]
        reads = plan.reads + [tail[:2] for tail in plan.tails]
        return frozenset((key, group) for key, group in reads if not self._rules[rows[group]].owns(key))


def _decide(rule: Rule, reader: Caller, identity: str | None, key: str) -> Verdict:
    """What single pulls of a group would get."""
    if not rule.answers(reader, identity, key):
        return _FORBIDDEN
    permissions = rule.collection.field_permissions
    if not permissions:
        return ADMITTED
    hidden = field_permissions.hidden(permissions, rule.roles_of(reader, identity))
    return Verdict(None, hidden) if hidden else ADMITTED


def _headers(named: list[Rule], caller: Caller, answer: _core.BatchAnswer) -> str:
    return f'{_cache_lines(named, caller, answer)}ETag: W/"{answer.etag}"\r\n'


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
    if answer.failed or not known_ms or len(known_ms) < len(ages_ms):
        control = "private, no-cache" if private else "no-cache"
    else:
        control = f"{'private' if private else 'public'}, max-age={min(known_ms) // 1000}"
    return f"Cache-Control: {control}\r\nVary: Authorization\r\n"
