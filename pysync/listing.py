"""Pages of a collection: the values of its last path parameter (wire section 7)."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from pysync.errors import Forbidden
from pysync.store import Store

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MOST_DENIED = 5_000
"""Number of names that one request looks at if the certificate denies some."""


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
    most: int | None = None,
) -> Page:
    """The first `limit` names directly under `prefix` that are greater than `after` and `admitted`.

    The store is asked for a page and one name more, again only where names were not admitted; so the cost
    follows the page, wherever it lies. No document is read: one that has outlived its `ttlMs` is listed
    until it is swept. Where `most` names have been looked at and some were admitted, the page ends early.

    Raises:
        Forbidden: none of `most` names was admitted.
        StoreUnavailable: nobody can tell.
    """
    items: list[str] = []
    size, met = limit + 1, 0
    while len(items) <= limit:
        names = await store.list(prefix, after, size)
        items += admitted(names)
        if len(names) < size:
            break
        after = names[-1]
        if most is not None and len(items) <= limit:
            met += len(names)
            if met >= most:
                if not items:
                    raise Forbidden
                return Page(items, has_more=True)
            size = MAX_LIMIT + 1
            await asyncio.sleep(0)
    return Page(items[:limit], len(items) > limit)
