"""Lists as text: what steps make of one."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import orjson

from pysync import _core
from pysync.plugins.projection.definition import Projection, Step


class NoList(Exception):
    """What is stored is not `{"items": [..]}`."""


class Work(NamedTuple):
    """A step of a projection. `at_ms` is the time of the write that says so: of two about one entry the later
    one counts. `since_ms` says where a new entry stands among others: that of the first write told of."""

    projection: Projection
    step: Step
    at_ms: int
    since_ms: int


class Folded(NamedTuple):
    """What a list becomes: its `body`, None where it stays as it is; how many `entries` it has then and how
    many `changed`; whose entries found no room (once for each)."""

    body: _core.PushBody | None
    entries: int
    changed: int
    dropped: list[Projection]


Change = Callable[[bytes | None], Folded]
"""Makes a list, the text of its `data`, into another; of None there is none yet. Raises NoList."""


def with_steps(work: Sequence[Work]) -> Change:
    """Put and take away entries (service, Projection rules 1 to 3 and 5). An entry that is there keeps its
    place."""

    def fold(data: bytes | None) -> Folded:
        return _fold(data, work)

    return fold


def without_others(kept: Collection[str]) -> Change:
    """Take away the entries whose ids are not `kept`."""

    def prune(data: bytes | None) -> Folded:
        members, entries = _read(data)
        gone = [id_ for id_ in entries if isinstance(id_, str) and id_ not in kept]
        for id_ in gone:
            del entries[id_]
        return _folded(members, entries, len(gone), [])

    return prune


def _fold(data: bytes | None, work: Sequence[Work]) -> Folded:
    members, entries = _read(data)
    newest = {one.step.id: one for one in sorted(work, key=lambda one: one.at_ms)}
    first: dict[str, int] = {}
    for one in work:
        first[one.step.id] = min(one.since_ms, first.get(one.step.id, one.since_ms))
    changed, dropped = 0, []
    for id_ in sorted(newest, key=first.__getitem__):
        projection, (_, entry), _, _ = newest[id_]
        held = entries.get(id_)
        if entry is None:
            changed += entries.pop(id_, None) is not None
        elif held is None and projection.max_items is not None and len(entries) >= projection.max_items:
            dropped.append(projection)
        elif held is None or not _is_same(held, entry):
            entries[id_] = entry
            changed += 1
    return _folded(members, entries, changed, dropped)


def _read(data: bytes | None) -> tuple[dict[str, Any], dict[Hashable, Any]]:
    """The list's members, and its entries by id, in order. What somebody else has put among them that is no
    entry, or a second one, stays where it is under a name that is no id."""
    members = {"items": []} if data is None else orjson.loads(data)
    items = members.get("items")
    if not isinstance(items, list):
        raise NoList
    entries: dict[Hashable, Any] = {}
    for at, item in enumerate(items):
        id_ = item.get("id") if isinstance(item, dict) else None
        entries[id_ if isinstance(id_, str) and id_ not in entries else at] = item
    return members, entries


def _folded(
    members: dict[str, Any], entries: dict[Hashable, Any], changed: int, dropped: list[Projection]
) -> Folded:
    body = None
    if changed:
        members["items"] = list(entries.values())
        body = _core.decode_push(orjson.dumps({"data": members}))
    return Folded(body, len(entries), changed, dropped)


def _is_same(one: object, other: object) -> bool:
    """As JSON, where `1` is not `true`."""
    return one == other and orjson.dumps(one, option=orjson.OPT_SORT_KEYS) == orjson.dumps(
        other, option=orjson.OPT_SORT_KEYS
    )
