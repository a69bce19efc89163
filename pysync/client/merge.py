"""Merging two versions of a document that were edited apart, given the version that both began from."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

JsonObject = dict[str, Any]
Path = tuple[str | int, ...]
"""The place of a value in a document: names of members, and ids of entries of lists."""

UNSAFE_KEYS: Final = frozenset({"__proto__", "constructor", "prototype", "__class__", "__dict__"})


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
"""Stands for a member or entry that does not exist."""


@dataclass(frozen=True, slots=True)
class MergeConflict:
    """A value that both sides changed, in different ways. Each of the three may be MISSING."""

    path: Path
    base: Any
    local: Any
    remote: Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """An edit that left nothing in a merge. `value` is what the `local` or the remote side wrote at `path`,
    MISSING if it removed what was there."""

    path: Path
    value: Any
    local: bool


def local_wins(conflict: MergeConflict) -> Any:
    """The default rule for conflicts: an edit wins over a removal, else the local side wins."""
    return conflict.remote if conflict.local is MISSING else conflict.local


def merge_remote_wins(local: Mapping[str, Any], remote: Mapping[str, Any]) -> JsonObject:
    """Merge two versions without the one that they began from, as the clients of the protocol do by default:
    the members of both, objects merged member by member, everything else as `remote` has it. The keys that a
    server drops are dropped here too."""
    return {
        name: _remote_value(local.get(name), value)
        for name, value in {**local, **remote}.items()
        if name not in UNSAFE_KEYS
    }


def _remote_value(local: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return merge_remote_wins(local if isinstance(local, dict) else {}, value)


@dataclass(frozen=True, slots=True)
class ThreeWayMerge:
    """Merges the changes of two sides to a common base.

    Objects are merged member by member. Lists in which every entry is an object with an id, the member
    `id_member` (a string or an integer, each once in its list), are merged entry by entry. Everything else
    is one value. A value that one side changed is taken from that side; `on_conflict` decides about one that
    both changed, in different ways.

    Entries come in the order of the remote list, unless the local side reordered those of the base: then in
    its order. Entries of the other list stand after the entry that they follow there, behind new ones of the
    first list.
    """

    on_conflict: Callable[[MergeConflict], Any] = local_wins
    id_member: str = "id"

    def merge(self, base: JsonObject, local: JsonObject, remote: JsonObject) -> JsonObject:
        """Return the document with the changes of both sides. It may share values with all three."""
        merged = self._value((), base, local, remote)
        return merged if isinstance(merged, dict) else {}

    def dropped(
        self, base: JsonObject, local: JsonObject, remote: JsonObject, merged: JsonObject
    ) -> list[Dropped]:
        """Return the edits that left no trace in `merged`, however that was made: in the place of what a side
        wrote is what the other side has, or the base."""
        return [
            *self._dropped((), base, local, remote, merged, is_local=True),
            *self._dropped((), base, remote, local, merged, is_local=False),
        ]

    def _value(self, path: Path, base: Any, local: Any, remote: Any) -> Any:
        if same(local, remote) or same(remote, base):
            return local
        if same(local, base):
            return remote
        if isinstance(local, dict) and isinstance(remote, dict):
            base = base if isinstance(base, dict) else {}
            return self._members(path, base, local, remote, [*remote, *local])
        mine, theirs = self._entries(local), self._entries(remote)
        if mine is not None and theirs is not None:
            before = self._entries(base) or {}
            order = _order(list(before), list(mine), list(theirs))
            return list(self._members(path, before, mine, theirs, order).values())
        return self.on_conflict(MergeConflict(path, base, local, remote))

    def _members(
        self,
        path: Path,
        base: dict[Any, Any],
        local: dict[Any, Any],
        remote: dict[Any, Any],
        names: list[Any],
    ) -> dict[Any, Any]:
        merged = {}
        for name in dict.fromkeys(names):
            versions = (side.get(name, MISSING) for side in (base, local, remote))
            value = self._value((*path, name), *versions)
            if value is not MISSING:
                merged[name] = value
        return merged

    def _entries(self, value: Any) -> dict[str | int, Any] | None:
        """Return the entries of a list by their ids, None for anything else."""
        if not isinstance(value, list):
            return None
        entries = {}
        for entry in value:
            id_ = entry.get(self.id_member) if isinstance(entry, dict) else None
            if not isinstance(id_, str | int) or isinstance(id_, bool) or id_ in entries:
                return None
            entries[id_] = entry
        return entries

    def _dropped(
        self, path: Path, base: Any, edited: Any, other: Any, merged: Any, *, is_local: bool
    ) -> Iterator[Dropped]:
        if same(edited, base) or same(edited, merged):
            return
        sides = (base, edited, other, merged)
        if isinstance(edited, dict) and isinstance(merged, dict):
            inner = [side if isinstance(side, dict) else {} for side in sides]
        else:
            entries = [self._entries(side) for side in sides]
            if entries[1] is None or entries[3] is None:
                if same(merged, other) or same(merged, base):
                    yield Dropped(path, edited, is_local)
                return
            inner = [side or {} for side in entries]
            if _is_reordering_dropped(list(inner[0]), list(inner[1]), list(inner[3])):
                yield Dropped(path, edited, is_local)
        for name in dict.fromkeys([*inner[0], *inner[1]]):
            versions = (side.get(name, MISSING) for side in inner)
            yield from self._dropped((*path, name), *versions, is_local=is_local)


def same(one: Any, other: Any) -> bool:
    """Return True if two values are the same JSON. Python finds `1` and `True` equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _order(base: list[Any], local: list[Any], remote: list[Any]) -> list[Any]:
    """Return the ids of both sides in the order of the merged list."""
    first, second = (remote, local) if _is_in_order(base, local) else (local, remote)
    in_first, in_second = set(first), set(second)
    following: dict[Any, list[Any]] = {}
    anchor: Any = MISSING
    for id_ in second:
        if id_ in in_first:
            anchor = id_
        else:
            following.setdefault(anchor, []).append(id_)
    order = []
    waiting = following.get(MISSING, [])
    for id_ in first:
        if id_ in in_second:
            order += waiting
            waiting = following.get(id_, [])
        order.append(id_)
    return order + waiting


def _is_in_order(one: list[Any], other: list[Any]) -> bool:
    """Return True if the ids that both lists hold have the same order in both."""
    in_one, in_other = set(one), set(other)
    return [id_ for id_ in one if id_ in in_other] == [id_ for id_ in other if id_ in in_one]


def _is_reordering_dropped(base: list[Any], edited: list[Any], merged: list[Any]) -> bool:
    """Return True if `edited` reorders entries of the base, and `merged` does not follow that order."""
    kept = set(base) & set(edited) & set(merged)
    base, edited, merged = ([id_ for id_ in ids if id_ in kept] for ids in (base, edited, merged))
    return base != edited != merged
