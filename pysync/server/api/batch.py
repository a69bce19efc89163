"""`GET {ns}/batch/pull`: many documents and logs of one namespace in one response.

Identical reads of one batch are made once. Large responses are built in the thread for heavy work. The
response stays within a budget of bytes.

See docs/reference/protocol.md#batch-pull.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

import orjson
from aiohttp import hdrs, web

from pysync import _core
from pysync.auth import field_permissions
from pysync.auth.authentication import AuthenticatedRequest
from pysync.auth.policy import AccessPolicy
from pysync.cache import BoundedCache
from pysync.concurrency import CORE_IN_THREAD_ABOVE, run_heavy
from pysync.engine.append_log import LogRange, LogSettings
from pysync.errors import AuthorizationError, DocumentCorrupt, Forbidden, PysyncError, RolesUnavailable
from pysync.model import ANONYMOUS, Caller
from pysync.server.api import Service
from pysync.server.api.batch_reads import (
    Budget,
    LogReadOutcome,
    LogReadRequest,
    LogReads,
    ReadOutcome,
    ReadTask,
    max_elements,
    read_many,
)
from pysync.server.authorization import Access, Memberships
from pysync.server.http.in_flight import Reservation
from pysync.server.http.responses import HeadResponse, Response, cache_headers, etag_matches
from pysync.server.http.router import Match
from pysync.store import StoredObject

_NOTHING: Final = frozenset[str]()
_T = TypeVar("_T")

PLANNED_BYTES: Final = 512 * 1024
"""Bytes of the queries whose plans are kept. A plan takes about ten times as many."""

Decision = Access | str
"""The decision on a group of entries: the access, or the text of an error."""


class PlannedBatch:
    """The plan of a query, taken out of the core once."""

    def __init__(self, plan: _core.BatchPlan, query_bytes: int) -> None:
        self.query_bytes = query_bytes
        self.answer = plan.answer
        self.collections = plan.collections
        self.groups = plan.groups
        self.reads = plan.reads
        self.known = plan.known
        self.keys = [key for key, _ in self.reads]
        self.tails = plan.tails
        self.document_times, self.tail_times = plan.times
        self.times = dict(zip(self.keys, self.document_times, strict=True))


Plans = BoundedCache[tuple[_core.BatchPlanner, bytes, str, _core.Scope | None], PlannedBatch]
"""The plans of the latest queries, by planner, query, identity and scope."""


def make_plans() -> Plans:
    """Return an empty cache for the batch handlers of a service."""
    return Plans(PLANNED_BYTES, lambda planned: planned.query_bytes)


_Group = tuple[int, str | None, list[str]]
"""Entries that share one decision, as a plan names them: the row of their collection, the `{identity}` of
their paths, and the values of the parameters on which the decision depends."""


class _Admitted(NamedTuple):
    """An admitted batch: its plan, and the decision on each group of the plan."""

    plan: PlannedBatch
    caller: Caller
    access_documents: dict[str, ReadOutcome]
    decisions: list[Decision]

    def __bool__(self) -> bool:
        """True if the caller may read anything."""
        return any(isinstance(decision, Access) for decision in self.decisions)


class BatchHandler:
    """The batch pulls of one `namespace`. `policies` are those of pulls of its collections, each with
    True if batches serve the collection. `plans` are those of all namespaces."""

    def __init__(
        self,
        service: Service,
        namespace: str | None,
        policies: Sequence[tuple[AccessPolicy, bool]],
        plans: Plans,
    ) -> None:
        config, hooks = service.config, service.hooks
        self._service = service
        self._namespace = namespace
        self._policies = [policy for policy, _ in policies]
        self._log_settings = [
            None if policy.collection.append_only is None else LogSettings.from_collection(policy.collection)
            for policy in self._policies
        ]
        self._authorizer = service.authorizer
        self._spaces = service.authorizer.spaces
        self._hooks = hooks
        self._has_hooks = hooks.has_authorize_hooks or hooks.has_pull_hooks
        self._now_ms = service.documents.now_ms
        self._plans = plans
        self._deciding_params = [
            list(policy.collection.path_template.params) if self._has_hooks else self._spaces.params(policy)
            for policy in self._policies
        ]
        self._planner = _core.BatchPlanner(
            [
                (policy.collection.name, policy.collection.storage_path, served, policy.needs_credentials,
                 policy.collection.ttl_ms, deciding, max_elements(policy))
                for (policy, served), deciding in zip(policies, self._deciding_params, strict=True)
            ],
            config.max_collections_per_batch,
            config.max_batch_append_elements,
            [suffix.lstrip("/") for suffix in config.batch_key_deny_suffixes],
        )  # fmt: skip

    async def pull(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve a batch pull. An error of an entry concerns that entry alone. Errors of the whole request are
        raised before any document is read."""
        query = request.raw_path.partition("?")[2].encode(errors="surrogateescape")
        plan, caller, access_documents, decisions = await self._admit(request, query)
        if self._hooks.has_pull_hooks:
            decisions = await asyncio.gather(*map(self._veto, plan.groups, decisions))
        named = [self._policies[row] for row in plan.collections]
        shadowed = self._shadowed_reads(plan)
        reservation = partial(self._service.in_flight.reservation, request)
        reads = BatchReads(
            self._service,
            self._log_settings,
            plan,
            decisions,
            shadowed,
            access_documents,
            reservation,
            self._now_ms(),
        )
        answer = await reads.full()
        headers = _headers(named, caller, answer)
        if caller == ANONYMOUS and hdrs.AUTHORIZATION in request.headers:
            headers += "WWW-Authenticate: Cap\r\n"
        if etag_matches(request, answer.etag):
            return Response(304, b"", headers)
        if request.method == "HEAD":
            return HeadResponse(headers)
        return Response(200, await reads.body(answer), headers)

    async def _admit(self, request: web.BaseRequest, query: bytes) -> _Admitted:
        """Return what the caller of a batch may read, who is anonymous if its credentials are invalid."""
        plan: PlannedBatch

        def metered(caller: Caller) -> list[AccessPolicy]:
            nonlocal plan
            plan = self._plan(query, caller)
            return [self._policies[row] for row in plan.collections]

        async def decide(verified: AuthenticatedRequest) -> _Admitted:
            caller = verified.caller
            access_documents = await self._read_access(plan, caller)
            memberships = self._spaces.memberships(access_documents) if access_documents else {}
            return _Admitted(plan, caller, access_documents, await self._decide(plan, caller, memberships))

        return await self._authorizer.admit_anyone(request, self._namespace, metered, decide)

    def _plan(self, query: bytes, caller: Caller) -> PlannedBatch:
        """Return the plan of a query of this caller, who may send it again and again. Raises as
        `BatchPlanner.plan`."""
        about = self._planner, query, caller.identity, caller.scope
        planned = self._plans.get(about)
        if planned is None:
            planned = PlannedBatch(self._planner.plan(*about[1:]), len(query))
            if not planned.known:  # a query with versions is sent once
                self._plans.put(about, planned)
        return planned

    async def _read_access(self, plan: PlannedBatch, caller: Caller) -> dict[str, ReadOutcome]:
        """Return the access documents of the spaces of the plan's groups."""
        if not caller.identity or not any(self._policies[row].uses_space_roles for row in plan.collections):
            return {}
        keys = {key for group in plan.groups if (key := self._access_key(group)) is not None}
        return await read_many(self._service.store, keys)

    def _access_key(self, group: _Group) -> str | None:
        row, _, values = group
        if not (self._policies[row].uses_space_roles and self._policies[row].needs_credentials):
            return None
        return self._spaces.access_document_key(dict(zip(self._deciding_params[row], values, strict=True)))

    async def _decide(self, plan: PlannedBatch, caller: Caller, memberships: Memberships) -> list[Decision]:
        """Return the decision on each group of the plan, which is that of single pulls. With hooks of
        plugins, a group is one document."""
        if self._has_hooks:
            return await asyncio.gather(
                *(self._decide_group(group, caller, memberships) for group in plan.groups)
            )
        caller = replace(caller, scope=None)  # the plan has applied the scope
        return [await self._decide_group(group, caller, memberships) for group in plan.groups]

    async def _decide_group(self, group: _Group, caller: Caller, memberships: Memberships) -> Decision:
        row, identity, _ = group
        params, key = self._params_and_key(group)
        return _decision(
            await self._authorizer.decide(self._policies[row], caller, identity, params, key, memberships)
        )

    async def _veto(self, group: _Group, decision: Decision) -> Decision:
        """Return the decision, or that of plugins that reject a pull of the group's document."""
        if isinstance(decision, str):
            return decision
        params, key = self._params_and_key(group)
        return _decision(await self._authorizer.veto(self._policies[group[0]], decision, params, key))

    def _params_and_key(self, group: _Group) -> tuple[dict[str, str], str]:
        """Return the parameters on which a decision depends and, with hooks, the key of the document."""
        row, _, values = group
        params = dict(zip(self._deciding_params[row], values, strict=True))
        return params, self._policies[row].collection.path_template.fill(params) if self._has_hooks else ""

    def _shadowed_reads(self, plan: PlannedBatch) -> frozenset[tuple[str, int]]:
        """Return the reads whose key belongs to another collection. A single pull of the key would require
        that collection's roles."""
        if not any(self._policies[row].shadowing_templates for row in plan.collections):
            return frozenset()
        rows = [row for row, _, _ in plan.groups]
        reads = plan.reads + [tail[:2] for tail in plan.tails]
        return frozenset(
            (key, group) for key, group in reads if not self._policies[rows[group]].owns_key(key)
        )


def _decision(access: Access | PysyncError) -> Decision:
    """Return a decision as entries have it: the access, or the text of the error."""
    if isinstance(access, Access):
        return access
    return AuthorizationError.default_message if isinstance(access, RolesUnavailable) else access.message


def _headers(named: list[AccessPolicy], caller: Caller, answer: _core.BatchAnswer) -> str:
    """Return the headers for all entries together, which are public if every entry is public for every
    caller."""
    is_public = not answer.failed and all(
        "public" in policy.roles
        and not policy.needs_credentials
        and not (caller.identity and policy.identity_index is not None)
        for policy in named
    )
    ages_ms = [] if answer.failed else [policy.collection.cache_duration_ms for policy in named]
    return f'{cache_headers(ages_ms, is_public=is_public)}ETag: W/"{answer.etag}"\r\n'


class BatchReads:
    """The reads of one batch pull. `log_settings` are those of the namespace's collections, None for one
    without logs. `decisions` are those on the groups of the plan, `shadowed` are reads of keys that belong to
    other collections, and `access` has access documents that were read already. `reservation` returns that of
    the request, which a batch needs once it has read a megabyte. `now_ms` is the time of the pull."""

    def __init__(
        self,
        service: Service,
        log_settings: Sequence[LogSettings | None],
        plan: PlannedBatch,
        decisions: Sequence[Decision],
        shadowed: frozenset[tuple[str, int]],
        access: Mapping[str, ReadOutcome],
        reservation: Callable[[], Reservation],
        now_ms: int,
    ) -> None:
        self._service = service
        self._store = service.store
        self._versions = service.documents.versions
        self._now_ms = now_ms
        self._plan = plan
        self._reads = plan.reads
        self._errors = [decision if isinstance(decision, str) else None for decision in decisions]
        self._hidden = [
            decision.hidden if isinstance(decision, Access) else _NOTHING for decision in decisions
        ]
        self._shadowed = shadowed
        self._access = access
        self._found: dict[str, ReadOutcome] = dict(access)
        self._is_plain = not shadowed and not any(self._errors) and not any(self._hidden)
        self._times = plan.times
        if not self._is_plain or plan.known or len(self._times) < len(self._reads):
            self._times = {}
            for read, times in zip(self._reads, plan.document_times, strict=True):
                if self._error_for(read) is None:
                    self._times[read[0]] = self._times.get(read[0], 0) + times
        self._unchanged: dict[int, str] = {}
        self._undecided: dict[str, list[int]] = {}
        for at in plan.known:
            if self._error_for(self._reads[at]) is None:
                self._undecided.setdefault(self._reads[at][0], []).append(at)
        self._budget = Budget(
            self._store,
            self._times,
            service.config.max_batch_bytes,
            reservation,
            self._undecided,
            self._drop_unchanged,
        )
        self._log_outcomes: list[LogReadOutcome] = []
        self._logs = self._make_log_reads(log_settings) if plan.tails else []

    def _error_for(self, read: tuple[str, int]) -> str | None:
        return Forbidden.default_message if read in self._shadowed else self._errors[read[1]]

    def _make_log_reads(self, log_settings: Sequence[LogSettings | None]) -> list[LogReads]:
        logs: dict[tuple[str, int], LogReads] = {}
        rows = [row for row, _, _ in self._plan.groups]
        for (key, group, *bounds), times in zip(self._plan.tails, self._plan.tail_times, strict=True):
            error = self._error_for((key, group))
            if error is None:
                log = logs.get((key, rows[group]))
                if log is None:
                    settings = log_settings[rows[group]]
                    assert settings is not None, "the plan's tails are of logs"
                    log = LogReads(self._service, key, settings, self._log_outcomes, self._budget)
                    logs[key, rows[group]] = log
                hidden = self._hidden[group]
                log.requests.append(LogReadRequest(len(self._log_outcomes), LogRange(*bounds), hidden, times))
            self._log_outcomes.append(error or "")
        return list(logs.values())

    async def full(self) -> _core.BatchAnswer:
        """Read all, and build the response. Raises BatchTooLarge."""
        if not self._is_plain and any(self._hidden):
            await self._versions.load()
        if self._undecided:
            self._drop_unchanged(self._found)
            for key, version in (await self._service.known_versions(self._undecided)).items():
                self._compare(self._found, key, *version)
        for key in self._access.keys() & self._times.keys():
            stored = self._access[key]
            size = stored.size if isinstance(stored, StoredObject) else 0
            self._budget.count_log_bytes(size, self._times[key])
        # If reads wait for a network, everything that is certainly needed is read concurrently.
        keys = self._unread() if self._store.is_remote else []
        if keys or self._logs:
            await self._read(keys, [log.begin for log in self._logs])
        logs = [log for log in self._logs if log.is_open]
        if logs:
            await self._read([], [log.weigh for log in logs])
        await self._read(self._unread(), [log.read for log in logs])
        return await self._build()

    async def body(self, answer: _core.BatchAnswer) -> bytes:
        """Return the body of a response from `full`."""
        return await self._in_thread_if_large(answer.body)

    def _unread(self) -> list[str]:
        found = self._found
        return [key for key in self._times if key not in found] if found else list(self._times)

    async def _read(self, keys: Sequence[str], extra_reads: Sequence[ReadTask]) -> None:
        self._found |= await read_many(self._store, keys, extra_reads, self._budget)

    def _drop_unchanged(self, found: dict[str, ReadOutcome]) -> None:
        """Compare what was read with the versions that the client has. Documents that no entry needs are
        replaced by None."""
        for key in self._undecided.keys() & found.keys():
            stored, hash_, written_ms = found[key], "", 0
            with suppress(DocumentCorrupt):  # building the response reports it
                if isinstance(stored, StoredObject):
                    document = _core.read_document(stored.body)
                    hash_, written_ms = document.hash, document.ts_ms
            self._compare(found, key, hash_, written_ms)

    def _compare(self, found: dict[str, ReadOutcome], key: str, hash_: str, written_ms: int) -> None:
        for at in self._undecided.pop(key):
            (digits, ttl_ms), (_, group) = self._plan.known[at], self._reads[at]
            version = self._versions.compute(key, hash_, written_ms, self._hidden[group])
            has_expired = ttl_ms is not None and written_ms + ttl_ms < self._now_ms
            if version.startswith(digits) and not has_expired:
                self._unchanged[at] = version
                self._times[key] -= self._plan.document_times[at]
        if not self._times[key]:
            found[key] = None

    async def _build(self) -> _core.BatchAnswer:
        """Build the response from what was read."""
        found, now_ms, unchanged = self._found, self._now_ms, self._unchanged or None

        def build() -> _core.BatchAnswer:
            if self._is_plain:
                return self._plan.answer(
                    list(map(found.__getitem__, self._plan.keys)), now_ms, None, self._log_outcomes, unchanged
                )
            stored = [self._redacted(read, found.get(read[0])) for read in self._reads]
            hidden = orjson.dumps([sorted(names) for names in self._hidden])
            return self._plan.answer(stored, now_ms, hidden, self._log_outcomes, unchanged)

        made = await self._in_thread_if_large(build)
        for key in made.corrupt if made.failed else ():
            self._service.corruption.report_once(DocumentCorrupt(), "document", key)
        return made

    async def _in_thread_if_large(self, work: Callable[[], _T]) -> _T:
        return await run_heavy(work) if self._budget.sent > CORE_IN_THREAD_ABOVE else work()

    def _redacted(self, read: tuple[str, int], stored: ReadOutcome) -> ReadOutcome | bytes:
        """Return the stored document as the caller may see it."""
        key, group = read
        hidden = self._hidden[group]
        error = self._error_for(read)
        if error is not None:
            return error
        if not hidden or not isinstance(stored, StoredObject):
            return stored
        try:
            document = _core.read_document(stored.body)
            data = field_permissions.redact(document.data, hidden)
        except DocumentCorrupt:
            return stored  # building the response reports it
        return document.redacted(data, self._versions.compute(key, document.hash, document.ts_ms, hidden))
