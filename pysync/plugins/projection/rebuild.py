"""Rebuilding lists from their sources, while sources are written and lists are folded."""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from pysync.changelog import ChangeLog
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.engine.changes import parse_change
from pysync.errors import DocumentCorrupt
from pysync.plugins.projection.lists import (
    MAX_FAILED_LISTS,
    ListSource,
    ListTransform,
    ListWriteOutcome,
    ListWriter,
    prune_entries,
)
from pysync.plugins.projection.sources import MAX_DOCUMENTS, ChangedSource, DocumentLocation
from pysync.plugins.projection.spec import ProjectionSpec


@dataclass(slots=True)
class _ListPlan:
    """The sources of one list: when each was last written, and the ids of its entries."""

    sources: dict[tuple[ProjectionSpec, DocumentLocation], tuple[int, ListSource]] = field(
        default_factory=dict
    )
    ids: set[str] = field(default_factory=set)
    is_chosen: bool = False


async def rebuild(
    lists: ListWriter, chosen: Sequence[ProjectionSpec], changes: ChangeLog
) -> tuple[str, dict[str, ListWriteOutcome]]:
    """Rebuild the lists of the `chosen` projections from the current state of their sources. Existing entries
    keep their positions, others are appended in the order in which their sources were written, and entries
    that no projection of `lists` makes are removed.

    Returns the outcome of each list, and an id of the change log: writes during the rebuild may be missing
    until the changes after that id have been folded. Raises Unavailable.
    """
    begun = await changes.last_id()
    related = [one for one in lists.projections if any(_may_share(one, other) for other in chosen)]
    wanted = await _list_plans(lists, related, chosen)
    for projection in chosen:
        async for key in _existing(lists, projection):
            wanted[key].is_chosen = True
    outcomes: dict[str, ListWriteOutcome] = {}

    async def rebuild_one(key: str) -> None:
        outcome = await _rebuild_list(lists, key, wanted[key], related)
        if outcome is not None:
            outcomes[key] = outcome

    chosen_lists = [key for key, one in wanted.items() if one.is_chosen]
    await gather_bounded(CONCURRENT, chosen_lists, rebuild_one, MAX_FAILED_LISTS)
    return begun, outcomes


async def catch_up(lists: ListWriter, changes: ChangeLog, after: str) -> bool:
    """Fold all writes after the id `after`; return False if the change log no longer reaches back to it.
    Raises Unavailable."""
    until = await changes.last_id()
    while after < until:
        found = await changes.read(after, MAX_DOCUMENTS)
        if found is None:
            return False
        if not found:
            break
        await lists.fold([parse_change(change) for _, change in found])
        after = found[-1][0]
    return True


async def _list_plans(
    lists: ListWriter, related: Sequence[ProjectionSpec], chosen: Sequence[ProjectionSpec]
) -> defaultdict[str, _ListPlan]:
    """Return the sources of each list."""
    wanted: defaultdict[str, _ListPlan] = defaultdict(_ListPlan)
    async for some in _pages(_sources(lists, related)):
        async for one, event in lists.sources.events(some):
            readers = [other for other in related if other.reads(one.location.namespace, one.location.name)]
            if isinstance(event, DocumentCorrupt):
                lists.report_corrupt(readers, one.location)
                continue
            for projection in readers:
                key = lists.target_key(projection, event)
                if key is None:
                    continue
                step = lists.entry_change(projection, event)
                list_ = wanted[key]
                list_.sources[projection, one.location] = (event.timestamp, (projection, one))
                list_.is_chosen |= projection in chosen
                if step is not None and step.entry is not None:
                    list_.ids.add(step.id)
    return wanted


async def _rebuild_list(
    lists: ListWriter, key: str, wanted: _ListPlan, related: Sequence[ProjectionSpec]
) -> ListWriteOutcome | None:
    """Fold a list's sources page by page, in the order of their last write, then remove entries that no
    source makes. Returns None if the object is not a list."""
    parts = [part for _, part in sorted(wanted.sources.values(), key=lambda dated: dated[0])]
    folded = [
        await lists.fold_list(key, parts[start : start + MAX_DOCUMENTS], repair=True)
        for start in range(0, len(parts), MAX_DOCUMENTS)
    ]

    async def prune() -> ListTransform:
        return partial(prune_entries, wanted.ids)

    targeting = [one for one in related if one.target_template is None or one.target_template.matches(key)]
    if any(lists.keys.has_unstored_sources(projection) for projection in targeting):
        return _total(folded)
    pruned = await lists.write(key, related, prune, repair=True)
    return None if pruned is None else _total([*folded, pruned])


def _total(outcomes: Sequence[ListWriteOutcome | None]) -> ListWriteOutcome:
    """Return the number of entries after the last of these writes, and of all changes that they made."""
    known = [one for one in outcomes if one is not None]
    return ListWriteOutcome(known[-1].entries if known else 0, sum(one.changed for one in known))


async def _sources(lists: ListWriter, projections: Sequence[ProjectionSpec]) -> AsyncIterator[ChangedSource]:
    """Yield every document and log that the projections read."""
    collections = {
        (namespace, collection.name): collection
        for projection in projections
        for namespace, collection in lists.keys.sources(projection)
    }
    for (namespace, _), collection in collections.items():
        async for key in lists.stored(*lists.keys.stored_at(collection)):
            location = lists.keys.location_at(namespace, collection, key)
            if location is not None:
                yield ChangedSource(location)


async def _existing(lists: ListWriter, projection: ProjectionSpec) -> AsyncIterator[str]:
    """Yield the lists that a template may have made. For a target function, only the lists that current
    sources name are known."""
    if projection.target_template is not None:
        async for key in lists.stored(projection.target_template):
            if lists.keys.is_list(projection.target_template, key):
                yield key


async def _pages(sources: AsyncIterator[ChangedSource]) -> AsyncIterator[list[ChangedSource]]:
    page: list[ChangedSource] = []
    async for source in sources:
        page.append(source)
        if len(page) == MAX_DOCUMENTS:
            yield page
            page = []
    if page:
        yield page


def _may_share(one: ProjectionSpec, other: ProjectionSpec) -> bool:
    """Return True if both may have entries in one list."""
    mine, theirs = one.target_template, other.target_template
    return mine is None or theirs is None or mine.overlaps(theirs)
