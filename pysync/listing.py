"""Pages of a collection: the values of its last path parameter (wire section 7)."""

from collections.abc import Callable
from typing import NamedTuple

from pysync.store import Store

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


class Page(NamedTuple):
    """Names in code-point order, and whether there are more after the last."""

    items: list[str]
    has_more: bool


async def page(
    store: Store,
    prefix: str,
    after: str | None,
    limit: int,
    admitted: Callable[[list[str]], list[str]],
) -> Page:
    """The first `limit` names directly under `prefix` that are greater than `after` and `admitted`.

    The store is asked for a page and one name more, again only where names were not admitted; so the cost
    follows the page, wherever it lies. No document is read: one that has outlived its `ttlMs` is listed
    until it is swept.

    Raises:
        StoreUnavailable: nobody can tell.
    """
    items: list[str] = []
    while len(items) <= limit:
        names = await store.list(prefix, after, limit + 1)
        items += admitted(names)
        if len(names) <= limit:
            break
        after = names[-1]
    return Page(items[:limit], len(items) > limit)
