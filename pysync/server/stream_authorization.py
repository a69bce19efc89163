"""Authorises change-stream subscribers. A subscriber receives an event only if it could pull the written
document at the moment of delivery (docs/reference/protocol.md#subscribe).

An index finds the collections, in any namespace, that could pull a written key. A change names its key; each
collection addresses it with parameters of its own (docs/reference/protocol.md#delivery).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final, NamedTuple, Protocol, cast

from pysync.auth.policy import AccessPolicy
from pysync.auth.spaces import MEMBER, OWNER, ROLE_TIMEOUT_S, add_roles
from pysync.auth.verification import VerifiedCertificate
from pysync.cache import CACHED_ENTRIES
from pysync.concurrency import gather_bounded
from pysync.config.key_templates import KeyTemplate, TemplateIndex
from pysync.engine.changes import DocumentRef, origin
from pysync.engine.subscriptions import (
    Authorize,
    Event,
    KeyMatch,
    PlannedDeliveries,
    Recipient,
    SubscriptionFilter,
    Topic,
)
from pysync.errors import PysyncError, RolesUnavailable, StoreUnavailable
from pysync.model import ANONYMOUS, Caller
from pysync.plugins import FileBackedCollection
from pysync.server.api import Service
from pysync.server.api.batch_reads import read_many
from pysync.server.authorization import Access, Memberships, may_read

log = logging.getLogger("pysync.server")

CHECK_MS: Final = 1_000
"""Milliseconds for which a certificate that was found valid is assumed to be valid."""
CHECKS_PER_TURN: Final = 64
"""Certificates that are checked before other tasks run."""
MAX_CONCURRENT_HOOKS: Final = 100
"""Maximum number of plugin decisions that are made concurrently."""
_ANY_IDENTITY: Final = "."
"""Stands for any identity. No identity equals it, because no parameter may have this value."""

_UNDECIDED: Final = RolesUnavailable()
_ANY_SPACE: Final = frozenset({OWNER, MEMBER})


class _Reader(NamedTuple):
    """A collection whose documents are pulled at `path`; None: at the keys where they are stored. `names` are
    those of its parameters."""

    policy: AccessPolicy
    topic: Topic
    path: KeyTemplate | None
    names: frozenset[str]


class KeyIndex:
    """The keys of the collections of a service. `policies` are those of their pulls. `stored_files` are the
    collections whose files a plugin stores, at keys of its own."""

    def __init__(
        self, policies: Iterable[AccessPolicy], stored_files: Mapping[str, FileBackedCollection]
    ) -> None:
        self._readers: dict[str, TemplateIndex[_Reader]] = {}
        self._stored_at: dict[Topic, tuple[KeyTemplate, str]] = {}
        self._writers: dict[str, Topic] = {}
        self._may_write = lru_cache(CACHED_ENTRIES)(self._overlaps)
        for policy in policies:
            topic, files = topic_of(policy), stored_files.get(policy.collection.name)
            path = policy.collection.key_template
            template, suffix = (path, "") if files is None else (KeyTemplate.of(files.template), files.suffix)
            self._stored_at[topic] = template, suffix
            self._writers[origin(*topic)] = topic
            if not policy.collection.push_only:
                pulled_at = None if files is None else path
                reader = _Reader(policy, topic, pulled_at, frozenset(path.params))
                self._readers.setdefault(suffix, TemplateIndex()).add(template, reader)

    def matches(self, ref: DocumentRef) -> list[KeyMatch]:
        """Return the written document under the parameters of each collection that could pull it: at most one
        in each namespace, because literal segments decide which collection owns a key. The list is empty if
        the writing collection no longer exists and the change has no key."""
        key, writer = self.key_of(ref), (ref.namespace, ref.collection)
        found: dict[str | None, KeyMatch] = {}
        for suffix, readers in self._readers.items():
            if not key or not key.endswith(suffix):
                continue
            for reader, values in readers.find(key.removesuffix(suffix)):
                namespace, _ = topic = reader.topic
                own = values if topic != writer else ref.params
                if own.keys() == reader.names and (namespace not in found or topic == writer):
                    pulled = key if reader.path is None else reader.path.fill(own)
                    if not reader.policy.shadowing_templates or reader.policy.owns_key(pulled):
                        found[namespace] = KeyMatch(topic, own, pulled)
        return list(found.values())

    def key_of(self, ref: DocumentRef) -> str:
        """Return the key in the store of a document; `""` if the change does not name it and the collection
        that wrote it no longer exists."""
        template, suffix = self._stored_at.get((ref.namespace, ref.collection), (None, ""))
        if ref.key or template is None or not ref.params.keys() >= set(template.params):
            return ref.key
        return template.fill(ref.params) + suffix

    def folders(self, wanted: SubscriptionFilter) -> set[str]:
        """Return the keys at or below which the documents of a subscription are stored; `""` stands for all
        keys."""
        found = set[str]()
        for topic, values in wanted.items():
            template, suffix = self._stored_at[topic]
            is_key = values.keys() >= set(template.params)
            found.add(template.folder(values) + (suffix if is_key else ""))
        return found

    def may_write_to(self, topics: Iterable[Topic]) -> Callable[[str], bool]:
        """Return a function that returns True if collections with this origin may write documents that one of
        `topics` pulls. It returns True for an unknown origin."""
        return partial(self._may_write, frozenset(topics))

    def _overlaps(self, readers: frozenset[Topic], origin: str) -> bool:
        writer = self._writers.get(origin)
        if writer is None:
            return True
        template = self._stored_at[writer][0]
        return any(template.overlaps(self._stored_at[topic][0]) for topic in readers)


def topic_of(policy: AccessPolicy) -> Topic:
    """Return the names by which subscribers address a policy's collection."""
    return policy.namespace, policy.collection.name


class AuthorizedRecipient(Recipient, Protocol):
    """A recipient with an identity. `proof` is the certificate that authenticates it, None if none was
    needed. `restricted` are the topics of which it may not receive every event. `verified_at_ms` is the time
    when the certificate was last found valid."""

    caller: Caller
    proof: VerifiedCertificate | None
    restricted: frozenset[Topic]
    verified_at_ms: int

    def close(self) -> None:
        """Close the stream, because the subscriber is no longer authorised."""


class StreamGrant(NamedTuple):
    """The events that a caller may subscribe to. Each event of a topic in `restricted` is authorised on its
    own."""

    filter: SubscriptionFilter
    restricted: frozenset[Topic]


class StreamAuthorizer:
    """The stream authorisation of one service. `policies` are those of pulls of its collections."""

    def __init__(self, service: Service, policies: Iterable[AccessPolicy], now_ms: Callable[[], int]) -> None:
        self._policies = {topic_of(policy): policy for policy in policies}
        self._versions = service.documents.versions
        self._authenticator = service.authenticator
        self._authorizer = service.authorizer
        self._spaces = service.authorizer.spaces
        self._store = service.store
        self._now_ms = now_ms
        self._checks = 0

    def grant(self, wanted: Mapping[Topic, Mapping[str, str]], caller: Caller) -> StreamGrant:
        """Return the part of `wanted` (parameters by collection) of which `caller` may ever receive
        events."""
        interest, restricted = {}, set()
        for topic, values in wanted.items():
            found = _static_grant(self._policies[topic], values, caller)
            if found is not None:
                interest[topic], is_restricted = found
                if is_restricted:
                    restricted.add(topic)
        return StreamGrant(interest, frozenset(restricted))

    async def authorize(self, plan: PlannedDeliveries) -> Authorize:
        """Collect what decides on these events, once for all subscribers: the validity of certificates, the
        membership of spaces, and the decisions of plugins. Return the function that authorises an event for a
        subscriber. Connections are aborted if their authorisation cannot be determined."""
        subscribers = {
            id(subscriber): cast(AuthorizedRecipient, subscriber)
            for _, listeners in plan
            for subscriber in listeners
        }.values()
        checks = [partial(self.check, subscriber) for subscriber in subscribers if self._is_due(subscriber)]
        keys = {key for event, _ in plan if (key := self._access_key(event)) is not None}
        try:
            async with asyncio.timeout(ROLE_TIMEOUT_S):
                found = await read_many(self._store, keys, checks)
            if any(self._policies[event.topic].collection.field_permissions for event, _ in plan):
                await self._versions.load()
        except (TimeoutError, PysyncError) as error:
            reason = error if isinstance(error, PysyncError) else "the store did not answer in time"
            log.warning(
                "aborted change streams, which cannot be authorised: %s",
                reason,
            )
            for subscriber in subscribers:
                subscriber.abort()
            return _deny_all
        known = self._spaces.memberships(found)
        by_plugins = await self._plugin_decisions(plan, known)
        variants: dict[tuple[str, Topic, frozenset[str]], Event] = {}

        def authorize_event(listener: Recipient, event: Event) -> Event | None:
            subscriber = cast(AuthorizedRecipient, listener)
            if event.topic not in subscriber.restricted:
                return event
            policy = self._policies[event.topic]
            if policy.uses_plugin_roles:
                access = by_plugins[id(listener), event.id]
            else:
                access = self._authorizer.decide_event(policy, subscriber.caller, event, known)
            if isinstance(access, PysyncError):
                if access.status >= 500:
                    listener.abort()
                return None
            if not access.hidden or event.removed:
                return event
            about = event.id, event.topic, access.hidden
            if about not in variants:
                variants[about] = event.with_version(
                    self._versions.compute(event.key, event.hash, event.timestamp_ms, access.hidden)
                )
            return variants[about]

        return authorize_event

    async def _plugin_decisions(
        self, plan: PlannedDeliveries, known: Memberships
    ) -> Mapping[tuple[int, str], Access | PysyncError]:
        """Return the decisions of plugins by subscriber and event. Those that are not made within 5 s count
        as undecided, because all other subscribers wait meanwhile."""
        pending = [
            (cast(AuthorizedRecipient, listener), event)
            for event, listeners in plan
            if self._policies[event.topic].uses_plugin_roles
            for listener in listeners
            if event.topic in cast(AuthorizedRecipient, listener).restricted
        ]
        found: dict[tuple[int, str], Access | PysyncError] = {
            (id(subscriber), event.id): _UNDECIDED for subscriber, event in pending
        }

        async def decide(delivery: tuple[AuthorizedRecipient, Event]) -> None:
            subscriber, event = delivery
            found[id(subscriber), event.id] = await self._authorizer.decide(
                self._policies[event.topic],
                subscriber.caller,
                event.params.get("identity"),
                event.params,
                event.key,
                known,
            )

        with suppress(TimeoutError):
            async with asyncio.timeout(ROLE_TIMEOUT_S):
                await gather_bounded(MAX_CONCURRENT_HOOKS, pending, decide)
        return found

    async def check(self, subscriber: AuthorizedRecipient) -> None:
        """Close a stream whose certificate is no longer valid, and abort it if that cannot be determined."""
        if subscriber.proof is None or not self._is_due(subscriber):
            return
        self._checks += 1
        if self._checks % CHECKS_PER_TURN == 0:
            await asyncio.sleep(0)
        now_ms = self._now_ms()
        try:
            if await self._authenticator.is_still_valid(subscriber.proof):
                subscriber.verified_at_ms = now_ms
            else:
                subscriber.close()
        except StoreUnavailable:
            subscriber.abort()

    def _is_due(self, subscriber: AuthorizedRecipient) -> bool:
        return subscriber.proof is not None and self._now_ms() - subscriber.verified_at_ms >= CHECK_MS

    def _access_key(self, event: Event) -> str | None:
        """Return the key of the access document that decides on the event; None if there is none."""
        policy = self._policies[event.topic]
        is_decided_there = policy.uses_space_roles and policy.needs_credentials
        return self._spaces.access_document_key(event.params) if is_decided_there else None


def _static_grant(
    policy: AccessPolicy, values: Mapping[str, str], caller: Caller
) -> tuple[Mapping[str, str], bool] | None:
    """Return the parameter values of the events that the caller may receive, and True if each event is
    authorised on its own. Return None if it may receive none."""
    scope, key = caller.scope if policy.needs_credentials else None, policy.collection.key_template
    names_document = values.keys() >= set(key.params)
    if policy.collection.push_only or (policy.collection.secret_names and not names_document):
        return None
    if scope is not None and names_document and not scope.allows(key.fill(values)):
        return None
    caller, own, identity = replace(caller, scope=None), caller.identity, _identity(policy, values)
    # The hidden members, and with them the version, depend on the event.
    is_restricted = scope is not None or bool(policy.collection.field_permissions)
    if may_read(policy, caller, identity) and not policy.uses_plugin_roles:
        return values, is_restricted
    if policy.uses_plugin_roles and (policy.allows_anonymous or caller != ANONYMOUS):
        return values, True
    if policy.uses_space_roles and own and may_read(policy, add_roles(caller, _ANY_SPACE), identity):
        return values, True
    issuer = own if caller.claims is None else caller.claims.issuer_id
    if identity == _ANY_IDENTITY and issuer != own and may_read(policy, caller, issuer):
        return values, True  # those of the issuer, and perhaps the caller's own
    if own and identity == _ANY_IDENTITY and may_read(policy, caller, own):
        return {**values, "identity": own}, is_restricted
    return None


def _deny_all(listener: Recipient, event: Event) -> Event | None:
    return None


def _identity(policy: AccessPolicy, values: Mapping[str, str]) -> str | None:
    """Return the identity whose documents these are: `_ANY_IDENTITY` if the values do not name it, None if
    the path has none."""
    return None if policy.identity_index is None else values.get("identity", _ANY_IDENTITY)
