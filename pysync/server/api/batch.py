"""`GET {ns}/batch/pull`: many documents and logs of one namespace in one response.

Identical reads of one batch are made once. Large responses are built in the thread for heavy work. The
response stays within a budget of bytes.

See docs/reference/protocol.md#batch-pull.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from aiohttp import web

from pysync import _core
from pysync.auth.authentication import AuthenticatedRequest
from pysync.auth.policy import AccessPolicy
from pysync.cache import BoundedCache
from pysync.engine.append_log import LogSettings
from pysync.errors import AuthorizationError, PysyncError, RolesUnavailable
from pysync.model import Caller
from pysync.server.api import Service
from pysync.server.api.batch_reads import ReadOutcome, max_elements, read_many
from pysync.server.api.batch_response import BatchReads, Decision, PlannedBatch
from pysync.server.authorization import Access, Memberships
from pysync.server.http.responses import HeadResponse, Response, cache_headers, etag_matches
from pysync.server.http.router import Match

PLANNED_BYTES: Final = 512 * 1024
"""Bytes of the queries whose plans are kept. A plan takes about ten times as many."""

Plans = BoundedCache[tuple[_core.BatchPlanner, bytes, str, _core.Scope | None], PlannedBatch]
"""The plans of the latest queries, by planner, query, identity and scope."""


def make_plans() -> Plans:
    """Return an empty cache for the batch handlers of a service."""
    return Plans(PLANNED_BYTES, lambda planned: planned.query_bytes)


_Group = tuple[int, str | None, list[str]]
"""Entries that share one decision, as a plan names them: the row of their collection, the `{identity}` of
their paths, and the values of the parameters on which the decision depends."""


class _Admitted(NamedTuple):
    """What the caller of a batch may read: the decision on each group of its plan."""

    plan: PlannedBatch
    caller: Caller
    access_documents: dict[str, ReadOutcome]
    decisions: list[Decision]

    def __bool__(self) -> bool:
        """True if the caller may read anything."""
        return any(isinstance(decision, Access) for decision in self.decisions)


class BatchHandler:
    """The batch pulls of one `namespace`. `rules` are the policies of pulls of its collections, each with
    True if batches serve the collection. `plans` are those of all namespaces."""

    def __init__(
        self,
        service: Service,
        namespace: str | None,
        rules: Sequence[tuple[AccessPolicy, bool]],
        plans: Plans,
    ) -> None:
        config, hooks = service.config, service.hooks
        self._service = service
        self._namespace = namespace
        self._rules = [rule for rule, _ in rules]
        self._log_settings = [
            None if rule.collection.append_only is None else LogSettings.from_collection(rule.collection)
            for rule in self._rules
        ]
        self._authorizer = service.authorizer
        self._spaces = service.authorizer.spaces
        self._hooks = hooks
        self._has_hooks = hooks.has_authorize_hooks or hooks.has_pull_hooks
        self._now_ms = service.documents.now_ms
        self._plans = plans
        self._deciding_params = [
            list(rule.collection.path_template.params) if self._has_hooks else self._spaces.params(rule)
            for rule in self._rules
        ]
        self._planner = _core.BatchPlanner(
            [
                (rule.collection.name, rule.collection.storage_path, served, rule.needs_credentials,
                 rule.collection.ttl_ms, deciding, max_elements(rule))
                for (rule, served), deciding in zip(rules, self._deciding_params, strict=True)
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
        named = [self._rules[row] for row in plan.collections]
        shadowed = self._shadowed_reads(plan)
        reservation = partial(self._service.in_flight.reservation, request)
        reads = BatchReads(
            self._service, self._log_settings, plan, decisions, shadowed, access_documents, reservation
        )
        answer = await reads.full(self._now_ms())
        headers = _headers(named, caller, answer)
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
            return [self._rules[row] for row in plan.collections]

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
            self._plans.put(about, planned)
        return planned

    async def _read_access(self, plan: PlannedBatch, caller: Caller) -> dict[str, ReadOutcome]:
        """Return the access documents of the spaces of the plan's groups."""
        if not caller.identity or not any(self._rules[row].uses_space_roles for row in plan.collections):
            return {}
        keys = {key for group in plan.groups if (key := self._access_key(group)) is not None}
        return await read_many(self._service.store, keys)

    def _access_key(self, group: _Group) -> str | None:
        row, _, values = group
        if not (self._rules[row].uses_space_roles and self._rules[row].needs_credentials):
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
            await self._authorizer.decide(self._rules[row], caller, identity, params, key, memberships)
        )

    async def _veto(self, group: _Group, decision: Decision) -> Decision:
        """Return the decision, or that of plugins that reject a pull of the group's document."""
        if isinstance(decision, str):
            return decision
        params, key = self._params_and_key(group)
        return _decision(await self._authorizer.veto(self._rules[group[0]], decision, params, key))

    def _params_and_key(self, group: _Group) -> tuple[dict[str, str], str]:
        """Return the parameters on which a decision depends and, with hooks, the key of the document."""
        row, _, values = group
        params = dict(zip(self._deciding_params[row], values, strict=True))
        return params, self._rules[row].collection.path_template.fill(params) if self._has_hooks else ""

    def _shadowed_reads(self, plan: PlannedBatch) -> frozenset[tuple[str, int]]:
        """Return the reads whose key belongs to another collection. A single pull of the key would require
        that collection's roles."""
        if not any(self._rules[row].shadowing_templates for row in plan.collections):
            return frozenset()
        rows = [row for row, _, _ in plan.groups]
        reads = plan.reads + [tail[:2] for tail in plan.tails]
        return frozenset((key, group) for key, group in reads if not self._rules[rows[group]].owns_key(key))


def _decision(access: Access | PysyncError) -> Decision:
    """Return a decision as entries have it: the access, or the text of the error."""
    if isinstance(access, Access):
        return access
    return AuthorizationError.default_message if isinstance(access, RolesUnavailable) else access.message


def _headers(named: list[AccessPolicy], caller: Caller, answer: _core.BatchAnswer) -> str:
    """Return the headers for all entries together, which are public if every entry is public for every
    caller."""
    is_public = not answer.failed and all(
        "public" in rule.roles
        and not rule.needs_credentials
        and not (caller.identity and rule.identity_index is not None)
        for rule in named
    )
    ages_ms = [] if answer.failed else [rule.collection.cache_duration_ms for rule in named]
    return f'{cache_headers(ages_ms, is_public=is_public)}ETag: W/"{answer.etag}"\r\n'
