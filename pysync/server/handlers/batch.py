"""`GET {ns}/batch/pull`: many documents and logs of one namespace in one answer (wire section 6).

The reads of one batch pull, within its budget: identical ones once, large ones beside the event loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

import orjson
from aiohttp import web

from pysync import _core, protocol
from pysync.auth import field_permissions
from pysync.auth.authentication import ANYBODY, Verified
from pysync.auth.policy import Rule
from pysync.auth.spaces import with_roles
from pysync.config import Config
from pysync.config.key_templates import document_key, params
from pysync.corruption import CorruptionReporter
from pysync.engine.append_log import Bounds, Logs
from pysync.engine.documents import Documents, Known
from pysync.errors import (
    AuthorizationError,
    DocumentCorrupt,
    Forbidden,
    PysyncError,
    RolesUnavailable,
)
from pysync.model import ANONYMOUS, Caller
from pysync.plugins.hooks import Hooks
from pysync.server.authorization import Callers, Roles, request_of
from pysync.server.handlers.batch_reads import (
    Asked,
    Budget,
    LogReads,
    Outcome,
    Read,
    Tails,
    Told,
    max_elements,
    read_each,
)
from pysync.server.responses import Answer, HeadAnswer, version_matches, wants_body
from pysync.server.router import Match
from pysync.store import READS_AT_ONCE, Store

IN_THREAD_ABOVE: Final = 64 * 1024
"""Bytes of documents that are rewritten, verified and joined beside the event loop."""


_T = TypeVar("_T")


class Verdict(NamedTuple):
    """The verdict on a group of entries: the text of an error, or the members `hidden` from its documents."""

    refusal: str | None
    hidden: frozenset[str] = frozenset()


ADMITTED: Final = Verdict(None)


class Reads:
    """The reads of one batch pull. `verdicts` decide the groups of the plan, `foreign` are reads of keys that
    belong to other collections, and `access` holds access documents that were read already. `at_once` reads
    run concurrently."""

    def __init__(
        self,
        store: Store,
        documents: Documents,
        tails: Tails,
        plan: _core.BatchPlan,
        verdicts: Sequence[Verdict],
        foreign: frozenset[tuple[str, int]],
        access: Mapping[str, Outcome],
        max_bytes: int,
        at_once: int,
        corruption: CorruptionReporter,
    ) -> None:
        self._store = store
        self._documents = documents
        self._plan = plan
        self._reads = plan.reads
        self._verdicts = verdicts
        self._foreign = foreign
        self._access = access
        self._at_once = at_once
        self._corruption = corruption
        self._versions = documents.versions
        self._found: dict[str, Outcome] = dict(access)
        document_times, tail_times = plan.times
        self._is_plain = not foreign and all(verdict is ADMITTED for verdict in verdicts)
        self._times: dict[str, int] = {}
        for read, times in zip(self._reads, document_times, strict=True):
            if self._is_plain or self._refusal(read) is None:
                self._times[read[0]] = self._times.get(read[0], 0) + times
        self._budget = Budget(store, self._times, max_bytes)
        self._told: list[Told] = []
        self._logs: list[LogReads] = self._asked(tails, tail_times) if tail_times else []

    def _refusal(self, read: tuple[str, int]) -> str | None:
        return Forbidden.text if read in self._foreign else self._verdicts[read[1]].refusal

    def _asked(self, tails: Tails, tail_times: Sequence[int]) -> list[LogReads]:
        asked: list[Asked] = []
        rows = [row for row, _, _ in self._plan.groups]
        for (key, group, *bounds), times in zip(self._plan.tails, tail_times, strict=True):
            refusal = self._refusal((key, group))
            if refusal is None:
                hidden = self._verdicts[group].hidden
                asked.append(Asked(len(self._told), rows[group], key, Bounds(*bounds), hidden, times))
            self._told.append(refusal or "")
        return tails.logs(asked, self._told, self._budget)

    async def begin(self, *, wants_body: bool) -> None:
        """Read the heads of logs, and where a body is wanted, the logs that are no more. Raises
        BatchTooLarge."""
        for key in self._access.keys() & self._times.keys():
            stored = self._access[key]
            self._budget.send(len(stored) if isinstance(stored, bytes) else 0, self._times[key])
        # If reads wait for a network, everything that is certainly needed is read concurrently.
        keys = self._unread() if self._store.reads_wait else []
        if keys or self._logs:
            await self._read(keys, [log.begin if wants_body else log.open for log in self._logs])
            if wants_body:
                self._logs = [log for log in self._logs if log.is_open]

    async def weigh(self) -> None:
        """Foresee what logs will send, as far as the store can tell. Raises BatchTooLarge."""
        if self._logs:
            await self._read([], [log.weigh for log in self._logs])

    async def version(self, now_ms: int) -> _core.BatchAnswer:
        """Build the answer without a body. Documents whose version this process knows are not read. Raises
        BatchTooLarge."""
        known: dict[str, Known] = {}
        unread = self._unread()
        found = await self._budget.infos(unread)
        self._budget.weigh(found)
        hidden = set()
        if not self._is_plain:
            hidden = {key for key, group in self._reads if self._verdicts[group].hidden}
        for key, info in found.items():
            version = None if info is None else self._documents.known(key, info.etag)
            if version is not None and key not in hidden:  # else what is told is made of its data
                known[key] = version
        if len(known) < len(unread):
            await self._read([key for key in unread if key not in known], [])
        answer = await self._answer(now_ms, {key: (each.hash, each.ts_ms) for key, each in known.items()})
        etags = self._budget.etags
        if etags:
            for (key, group), met in zip(self._reads, answer.versions, strict=True):
                if met is not None and key in etags and not self._verdicts[group].hidden:
                    self._documents.remember(key, Known(met[0], etags[key], met[1]))
        return answer

    async def whole(self, now_ms: int) -> _core.BatchAnswer:
        """The answer with its body. Raises BatchTooLarge."""
        await self.weigh()
        await self._read(self._unread(), [log.read for log in self._logs])
        return await self._answer(now_ms, {})

    async def body(self, answer: _core.BatchAnswer) -> bytes:
        """The text of an answer that is whole."""
        return await self._beside(answer.body)

    def _unread(self) -> list[str]:
        return [key for key in self._times if key not in self._found]

    async def _read(self, keys: Sequence[str], beside: Sequence[Read]) -> None:
        self._found |= await read_each(self._store, keys, beside, self._budget, at_once=self._at_once)

    async def _answer(self, now_ms: int, known: Mapping[str, tuple[str, int]]) -> _core.BatchAnswer:
        """Build the answer from what was read, and from versions if only those are `known`."""
        found: Mapping[str, Outcome | tuple[str, int]] = {**self._found, **known} if known else self._found
        if not self._is_plain and any(verdict.hidden for verdict in self._verdicts):
            await self._versions.load()

        def answer() -> _core.BatchAnswer:
            if self._is_plain:
                return self._plan.answer([found[key] for key, _ in self._reads], now_ms, None, self._told)
            stored = [self._visible(read, found.get(read[0])) for read in self._reads]
            hidden = orjson.dumps([sorted(verdict.hidden) for verdict in self._verdicts])
            return self._plan.answer(stored, now_ms, hidden, self._told)

        made = await self._beside(answer)
        for key in made.corrupt if made.failed else ():
            self._corruption.meet(DocumentCorrupt(), "document", key)
        return made

    async def _beside(self, work: Callable[[], _T]) -> _T:
        return await asyncio.to_thread(work) if self._budget.sent > IN_THREAD_ABOVE else work()

    def _visible(self, read: tuple[str, int], stored: Outcome | tuple[str, int]) -> Outcome | tuple[str, int]:
        """Return the stored document as the caller may see it."""
        key, group = read
        hidden = self._verdicts[group].hidden
        refusal = self._refusal(read)
        if refusal is not None:
            return refusal
        if not hidden or not isinstance(stored, bytes):
            return stored
        try:
            document = _core.read_document(stored)
            data = field_permissions.without(document.data, hidden)
        except DocumentCorrupt:
            return stored  # the answer finds it out, too
        return document.redacted(data, self._versions.of(key, document.hash, document.ts_ms, hidden))


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
