"""Making lists anew from their sources, while these are written and the lists are folded."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pysync.changelog import ChangeLog, read_change
from pysync.config import key_templates
from pysync.errors import DocumentCorrupt
from pysync.plugins.projection.fold import Change, Touched, without_others
from pysync.plugins.projection.lists import Lists, Outcome, Part, for_each
from pysync.plugins.projection.spec import ProjectionSpec
from pysync.plugins.projection.targets import Place

_PAGE: Final = 256
"""Sources that are read, and folded into a list, together."""


@dataclass(slots=True)
class _Wanted:
    """What the sources say of one list: the parts that it is made of, when each was written last, and the ids
    of the entries that it has."""

    parts: dict[tuple[ProjectionSpec, Place], tuple[int, Part]] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    is_chosen: bool = False

    def in_order(self) -> list[Part]:
        return [part for _, part in sorted(self.parts.values(), key=lambda dated: dated[0])]


async def rebuild(
    lists: Lists, chosen: Sequence[ProjectionSpec], changes: ChangeLog
) -> tuple[str, dict[str, Outcome]]:
    """Bring the lists of the `chosen` projections to what their sources say now. Entries that are there keep
    their places, others are appended in the order in which their sources were written, and entries that no
    projection of `lists` makes are taken away.

    Returns what became of each list, and an id of the change log: what was written while this ran may be
    missing until the changes after that id have been folded. Raises Unavailable.
    """
    begun = await changes.newest()
    related = [one for one in lists.projections if any(_may_share(one, other) for other in chosen)]
    wanted = await _wanted(lists, related, chosen)
    for projection in chosen:
        async for key in _existing(lists, projection):
            wanted[key].is_chosen = True
    outcomes: dict[str, Outcome] = {}

    async def rebuild_one(key: str) -> None:
        outcome = await _rebuild_list(lists, key, wanted[key], related)
        if outcome is not None:
            outcomes[key] = outcome

    await for_each([key for key, one in wanted.items() if one.is_chosen], rebuild_one)
    return begun, outcomes


async def catch_up(lists: Lists, changes: ChangeLog, after: str) -> bool:
    """Fold all that was written after the id `after`; False where that is not known any more. Raises
    Unavailable."""
    until = await changes.newest()
    while after < until:
        found = await changes.changes(after, _PAGE)
        if found is None:
            return False
        if not found:
            break
        await lists.fold([read_change(change) for _, change in found])
        after = found[-1][0]
    return True


async def _wanted(
    lists: Lists, related: Sequence[ProjectionSpec], chosen: Sequence[ProjectionSpec]
) -> defaultdict[str, _Wanted]:
    """What all sources say, by list."""
    wanted: defaultdict[str, _Wanted] = defaultdict(_Wanted)
    async for some in _pages(_sources(lists, related)):
        async for one, event in lists.sources.events(some):
            readers = [other for other in related if other.reads(one.place.namespace, one.place.name)]
            if isinstance(event, DocumentCorrupt):
                lists.unreadable(readers, one.place)
                continue
            for projection in readers:
                key = lists.list_of(projection, event)
                if key is None:
                    continue
                step = lists.step(projection, event)
                list_ = wanted[key]
                list_.parts[projection, one.place] = (event.timestamp, (projection, one))
                list_.is_chosen |= projection in chosen
                if step is not None and step.entry is not None:
                    list_.ids.add(step.id)
    return wanted


async def _rebuild_list(
    lists: Lists, key: str, wanted: _Wanted, related: Sequence[ProjectionSpec]
) -> Outcome | None:
    """Fold a list's sources, a page at a time, as they are then; last take away what none of them makes. None
    where it is no list."""
    parts = wanted.in_order()
    folded = [
        await lists.fold_list(key, parts[start : start + _PAGE], heals=True)
        for start in range(0, len(parts), _PAGE)
    ]

    async def prune() -> Change:
        return without_others(wanted.ids)

    if any(lists.keys.forgets(projection) and _may_keep(projection, key) for projection in related):
        return Outcome(*_sums(folded))
    pruned = await lists.write(key, related, prune, heals=True)
    if pruned is None:
        return None
    return Outcome(*_sums([*folded, pruned]))


def _sums(outcomes: Sequence[Outcome | None]) -> tuple[int, int]:
    """Return the number of entries of the list after the last of these, and the number of changes that all of
    them made."""
    known = [one for one in outcomes if one is not None]
    return known[-1].entries if known else 0, sum(one.changed for one in known)


def _may_keep(projection: ProjectionSpec, key: str) -> bool:
    target = projection.target
    return not isinstance(target, str) or key_templates.matches(target, key)


async def _sources(lists: Lists, projections: Sequence[ProjectionSpec]) -> AsyncIterator[Touched]:
    """Every document and log that the projections read."""
    collections = {
        (namespace, collection.name): collection
        for projection in projections
        for namespace, collection in lists.keys.sources(projection)
    }
    for (namespace, _), collection in collections.items():
        async for key in lists.stored(*lists.keys.stored_at(collection)):
            place = lists.keys.place(namespace, collection, key)
            if place is not None:
                yield Touched(place)


async def _existing(lists: Lists, projection: ProjectionSpec) -> AsyncIterator[str]:
    """The lists that a template may have made. Of those that a function names only the ones that sources name
    still are known."""
    target = projection.target
    if isinstance(target, str):
        async for key in lists.stored(target):
            if lists.keys.is_list(target, key):
                yield key


async def _pages(sources: AsyncIterator[Touched]) -> AsyncIterator[list[Touched]]:
    page: list[Touched] = []
    async for source in sources:
        page.append(source)
        if len(page) == _PAGE:
            yield page
            page = []
    if page:
        yield page


def _may_share(one: ProjectionSpec, other: ProjectionSpec) -> bool:
    """Whether both may have entries in one list."""
    if not isinstance(one.target, str) or not isinstance(other.target, str):
        return True
    segments = one.target.split("/"), other.target.split("/")
    return len(segments[0]) == len(segments[1]) and all(
        part == same or key_templates.PARAM.fullmatch(part) or key_templates.PARAM.fullmatch(same)
        for part, same in zip(*segments, strict=True)
    )
