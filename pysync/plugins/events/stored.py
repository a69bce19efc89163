"""Which files hold the events of a template at one moment."""

import re
from collections.abc import AsyncIterator
from itertools import takewhile
from typing import Final

from pysync.config.template import matches
from pysync.errors import StoreUnavailable
from pysync.plugins.events.batches import SUFFIX
from pysync.store import Store, merge_journal

_TRIES: Final = 10

batch_match = re.compile(rf"([0-9]{{13}})(-[0-9]{{6}}-)([0-9a-f]{{12}}){re.escape(SUFFIX)}").fullmatch
"""The name of a batch's file: milliseconds, number and random digits."""


async def batch_keys(store: Store, storage_path: str) -> AsyncIterator[str]:
    """The keys of all files of batches below the template, in no promised order."""
    literal = "/".join(takewhile(lambda part: not part.startswith("{"), storage_path.split("/")))
    async for listed in store.walk(literal):
        if batch_match(listed.key.rpartition("/")[2]) and matches(storage_path, listed.key):
            yield listed.key


async def current_keys(store: Store, storage_path: str) -> list[str]:
    """The keys of files that hold each event once, in the order of their names, also while files are merged.
    Raises StoreUnavailable where too much is merged meanwhile."""
    for _ in range(_TRIES):
        found = {key async for key in batch_keys(store, storage_path)}
        # Where nothing of it has gone until afterwards, it is what there was when the merges were read.
        merges = await merge_journal.merges(store)
        if found <= {key async for key in batch_keys(store, storage_path)}:
            for merge in merges:
                if merge.key in found:
                    found -= merge.merged.keys()
            return sorted(found)
    raise StoreUnavailable("files are being merged all the time: try again")
