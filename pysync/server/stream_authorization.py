"""Who may hear of what: of a write hears who could pull what was written, decided when it is told (wire
section 9).

An index of the collections that could pull a written key, in any namespace (wire section 9). A change
names its key; the name that each collection has for it is found here when the change is delivered.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol, cast

from pysync.auth import field_permissions
from pysync.auth.authentication import Access
from pysync.auth.certificate_cache import Proof
from pysync.auth.policy import Rule
from pysync.auth.spaces import MEMBER, OWNER, RESOLVE_S, Membership, with_roles
from pysync.changelog import Subject, origin
from pysync.config.derived import document_path
from pysync.config.key_templates import TemplateIndex, document_key, meet, params
from pysync.engine.keyed_versions import KeyedVersions
from pysync.engine.subscriptions import Event, Interest, KeyMatch, Listener, Permit, Plan, Topic
from pysync.errors import PysyncError, StoreUnavailable
from pysync.model import ANONYMOUS, Caller
from pysync.plugins import StoredFiles
from pysync.server.authorization import Roles
from pysync.server.handlers.batch_reads import read_each
from pysync.store import Store

MAX_CACHED: Final = 1_000
"""Number of sets of collections for which the origins that write to them are cached."""


class _Reader(NamedTuple):
    """A collection that is pulled at `path`, None: where its documents are stored. `names` are those of its
    parameters."""

    rule: Rule
    topic: Topic
    path: list[str] | None
    names: frozenset[str]


class KeyIndex:
    """The keys of a service's collections. `rules` are those of pulling them, `stored` the collections whose
    files a plugin keeps, at keys of its own."""

    def __init__(self, rules: Iterable[Rule], stored: Mapping[str, StoredFiles]) -> None:
        self._readers: dict[str, TemplateIndex[_Reader]] = {}
        self._stored_at: dict[Topic, tuple[str, str]] = {}
        self._writers: dict[str, Topic] = {}
        self._cached: dict[frozenset[Topic], dict[str, bool]] = {}
        for rule in rules:
            topic, files = topic_of(rule), stored.get(rule.collection.name)
            path = document_path(rule.collection)
            template, suffix = (path, "") if files is None else (files.template, files.suffix)
            self._stored_at[topic] = template, suffix
            self._writers[origin(*topic)] = topic
            if not rule.collection.push_only:
                pulled_at = None if files is None else path.split("/")
                reader = _Reader(rule, topic, pulled_at, frozenset(params(path)))
                self._readers.setdefault(suffix, TemplateIndex()).add(template, reader)

    def matches(self, subject: Subject) -> list[KeyMatch]:
        """Return the written document as each collection names it that could pull it: at most one in each
        namespace, since literal segments decide whose a key is. None if the writing collection is gone and
        left no key."""
        key, writer = subject.key or self._key_of(subject), (subject.namespace, subject.collection)
        found: dict[str | None, KeyMatch] = {}
        for suffix, readers in self._readers.items():
            if not key or not key.endswith(suffix):
                continue
            for reader, values in readers.find(key.removesuffix(suffix)):
                namespace, _ = topic = reader.topic
                own = values if topic != writer else subject.params
                if own.keys() == reader.names and (namespace not in found or topic == writer):
                    pulled = key if reader.path is None else document_key(reader.path, own)
                    if not reader.rule.rivals or reader.rule.owns(pulled):
                        found[namespace] = KeyMatch(topic, own, pulled)
        return list(found.values())

    def may_write_to(self, topics: Iterable[Topic]) -> Callable[[str], bool]:
        """Return True if collections with this origin may write documents that one of `topics` pulls. An
        unknown origin may."""
        readers = frozenset(topics)
        if readers not in self._cached and len(self._cached) >= MAX_CACHED:
            self._cached.clear()
        known = self._cached.setdefault(readers, {})

        def may_write(origin: str) -> bool:
            writer = self._writers.get(origin)
            if writer is None:
                return True
            if origin not in known:
                template = self._stored_at[writer][0]
                known[origin] = any(meet(template, self._stored_at[topic][0]) for topic in readers)
            return known[origin]

        return may_write

    def _key_of(self, subject: Subject) -> str:
        """The key in the store of what a collection wrote at its path, `""` where there is no such one."""
        template, suffix = self._stored_at.get((subject.namespace, subject.collection), ("", ""))
        if not template or not subject.params.keys() >= set(params(template)):
            return ""
        return document_key(template.split("/"), subject.params) + suffix


def topic_of(rule: Rule) -> Topic:
    """Return the names that subscribers know a rule's collection by."""
    return rule.namespace, rule.collection.name


log = logging.getLogger("pysync.server")

CHECK_MS: Final = 1_000
"""For how long a certificate that holds is taken to hold."""
ASKED_AT_ONCE: Final = 100
"""How many questions plugins are asked at a time."""
_SOMEBODY: Final = "."
"""An identity that nobody has: no parameter takes it."""

REFUSED: Final = Caller(roles=frozenset())
"""Who may hear nothing: a plugin has refused them."""
_ANY_SPACE: Final = frozenset({OWNER, MEMBER})


class Hearer(Listener, Protocol):
    """A listener who is somebody. `proof` is what lets them in, None where nothing was asked for. `asked` are
    the topics of which they may not hear everything. `held_at_ms`: when the proof was last seen to hold."""

    caller: Caller
    proof: Proof | None
    asked: frozenset[Topic]
    held_at_ms: int

    def end(self) -> None:
        """They may not listen any more."""


class Grant(NamedTuple):
    """What somebody may listen for: of `asked` not every event."""

    interest: Interest
    asked: frozenset[Topic]


class Hearing:
    """The decisions of one service. `rules` are those of pulling its collections."""

    def __init__(
        self,
        rules: Iterable[Rule],
        access: Access,
        roles: Roles,
        store: Store,
        now_ms: Callable[[], int],
        versions: KeyedVersions,
    ) -> None:
        self._rules = {topic_of(rule): rule for rule in rules}
        self._templates = {topic: _template(rule) for topic, rule in self._rules.items()}
        self._names = {
            topic: frozenset(params(rule.collection.storage_path)) for topic, rule in self._rules.items()
        }
        self._versions = versions
        self._access = access
        self._roles = roles
        self._spaces = roles.spaces
        self._store = store
        self._now_ms = now_ms

    def grant(self, wanted: Mapping[Topic, Mapping[str, str]], caller: Caller) -> Grant:
        """What of `wanted`, parameters by collection, `caller` may ever hear of."""
        interest, asked = {}, set()
        for topic, values in wanted.items():
            found = self._may_hear(topic, values, caller)
            if found is not None:
                interest[topic], is_asked = found
                if is_asked:
                    asked.add(topic)
        return Grant(interest, frozenset(asked))

    def _key(self, topic: Topic, values: Mapping[str, str]) -> str:
        return document_key(self._templates[topic], dict(values))

    def _may_hear(
        self, topic: Topic, values: Mapping[str, str], caller: Caller
    ) -> tuple[Mapping[str, str], bool] | None:
        """The parameters' values of what the caller may hear of, and whether each event is yet to be decided
        on; None: of none."""
        rule = self._rules[topic]
        if rule.collection.push_only:
            return None
        scope = caller.scope if rule.examines else None
        is_one = self._names[topic] <= values.keys()
        if scope is not None and is_one and not scope.allows(self._key(topic, values)):
            return None
        caller, own, identity = replace(caller, scope=None), caller.identity, _identity(rule, values)
        # The members that they miss, and so their version, depend on the event.
        is_asked = scope is not None or bool(rule.collection.field_permissions)
        if rule.answers(caller, identity, "") and not rule.by_plugin:
            return values, is_asked
        if rule.by_plugin and (rule.admits_anonymous or caller != ANONYMOUS):
            return values, True
        if rule.by_space and own and rule.answers(with_roles(caller, _ANY_SPACE), identity, ""):
            return values, True
        if own and identity == _SOMEBODY and rule.answers(caller, own, ""):
            return {**values, "identity": own}, is_asked
        return None

    async def permits(self, plan: Plan) -> Permit:
        """Ask all that decides on these events, once for all who listen: whether certificates hold, who
        belongs to a space, and plugins. Who cannot be decided on is cut."""
        hearers = {id(who): cast(Hearer, who) for _, listeners in plan for who in listeners}.values()
        checks = [partial(self.check, hearer) for hearer in hearers if self._is_due(hearer)]
        keys = {
            key for event, _ in plan if (key := self._access_key(self._rules[event.topic], event)) is not None
        }
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await read_each(self._store, keys, checks)
        except TimeoutError:
            log.warning("change streams were cut, as the store does not say who may hear of what")
            for hearer in hearers:
                hearer.cut()
            return _nobody
        known = {
            key: None if isinstance(stored, str) else self._spaces.membership(key, stored)
            for key, stored in found.items()
        }
        by_plugins = await self._by_plugins(plan, known)
        if any(self._rules[event.topic].collection.field_permissions for event, _ in plan):
            try:
                await self._versions.load()
            except PysyncError:
                for hearer in hearers:
                    hearer.cut()
                return _nobody
        variants: dict[tuple[str, Topic, frozenset[str]], Event] = {}

        def permit(listener: Listener, event: Event) -> Event | None:
            hearer = cast(Hearer, listener)
            if event.topic not in hearer.asked:
                return event
            rule = self._rules[event.topic]
            if rule.by_plugin:
                caller = by_plugins[id(listener), event.id]
            else:
                caller = self._in_space(rule, hearer, event, known)
            if caller is None:
                listener.cut()
                return None
            identity = event.params.get("identity")
            if not rule.answers(caller, identity, event.key):
                return None
            hidden = field_permissions.hidden(
                rule.collection.field_permissions, rule.roles_of(caller, identity)
            )
            if not hidden:
                return event
            variant = variants.get((event.id, event.topic, hidden))
            if variant is None:
                variant = event.told(self._versions.of(event.key, event.hash, event.timestamp_ms, hidden))
                variants[event.id, event.topic, hidden] = variant
            return variant

        return permit

    def _in_space(
        self, rule: Rule, hearer: Hearer, event: Event, known: Mapping[str, Membership | None]
    ) -> Caller | None:
        """The hearer with the roles of the event's space; None where these cannot be told."""
        caller = hearer.caller
        space = self._access_key(rule, event) if caller.identity else None
        if space is None:
            return caller
        membership = known[space]
        return None if membership is None else with_roles(caller, membership.roles(caller.identity))

    async def _by_plugins(
        self, plan: Plan, known: Mapping[str, Membership | None]
    ) -> Mapping[tuple[int, str], Caller | None]:
        """Those whom plugins are asked about, by event, with all their roles: `REFUSED` where one refuses
        them, None where one fails, or where asking them all takes longer than 5 s: whoever else listens
        waits for that."""
        asked = [
            (cast(Hearer, listener), event)
            for event, listeners in plan
            if self._rules[event.topic].by_plugin
            for listener in listeners
            if event.topic in cast(Hearer, listener).asked
        ]
        found: dict[tuple[int, str], Caller | None] = {
            (id(hearer), event.id): None for hearer, event in asked
        }
        waiting = iter(asked)

        async def ask_on() -> None:
            for hearer, event in waiting:
                rule = self._rules[event.topic]
                caller = self._in_space(rule, hearer, event, known)
                found[id(hearer), event.id] = await self._asked_of_plugins(rule, caller, event)

        with suppress(TimeoutError):
            async with asyncio.timeout(RESOLVE_S), asyncio.TaskGroup() as group:
                for _ in range(min(ASKED_AT_ONCE, len(asked))):
                    group.create_task(ask_on())
        return found

    async def _asked_of_plugins(self, rule: Rule, caller: Caller | None, event: Event) -> Caller | None:
        if caller is None:
            return None
        try:
            return await self._roles.by_plugins(rule, caller, event.params, event.key)
        except PysyncError as error:
            return REFUSED if error.status < 500 else None

    async def check(self, hearer: Hearer) -> None:
        """End whoever listens by a certificate that does not hold any more, and cut where nobody can tell."""
        if hearer.proof is None or not self._is_due(hearer):
            return
        now_ms = self._now_ms()
        try:
            if await self._access.holds(hearer.proof):
                hearer.held_at_ms = now_ms
            else:
                hearer.end()
        except StoreUnavailable:
            hearer.cut()

    def _is_due(self, hearer: Hearer) -> bool:
        return hearer.proof is not None and self._now_ms() - hearer.held_at_ms >= CHECK_MS

    def _access_key(self, rule: Rule, event: Event) -> str | None:
        """Where the access document lies that has a say."""
        return self._spaces.key(event.params) if rule.by_space and rule.examines else None


def _nobody(listener: Listener, event: Event) -> Event | None:
    return None


def _template(rule: Rule) -> Sequence[str]:
    collection = rule.collection
    template = collection.storage_path.split("/")
    return template if collection.bundle is None else [*template, collection.name]


def _identity(rule: Rule, values: Mapping[str, str]) -> str | None:
    """Whose documents these are: `_SOMEBODY`'s where the values leave it open, None where nobody's."""
    return None if rule.identity_index is None else values.get("identity", _SOMEBODY)
