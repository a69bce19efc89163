"""An index of the collections that could pull a written key, in any namespace (wire section 9). A change
names its key; the name that each collection has for it is found here when the change is delivered."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from pysync.auth.policy import Rule
from pysync.changelog import Subject, origin
from pysync.config.derived import document_path
from pysync.config.key_templates import TemplateIndex, document_key, meet, params
from pysync.engine.subscriptions import KeyMatch, Topic
from pysync.plugins import StoredFiles

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
