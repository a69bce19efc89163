"""Entries of keyrings that hold a content key for one recipient."""

from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import orjson

from pysync import _core
from pysync.engine.outbox import DocumentRef
from pysync.erase.scope import keyring_templates
from pysync.errors import Conflict, DocumentCorrupt
from pysync.plugins import PluginContext
from pysync.store import StoredObject


async def remove_entries(
    services: PluginContext,
    kem_keys: Collection[str],
    ref_of: Callable[[str], DocumentRef | None],
    *,
    dry_run: bool = False,
) -> int:
    """Remove the entries of these recipients (X25519 public keys) from all keyrings, also from their earlier
    epochs. Returns their number. Each change is announced as one of the document that `ref_of` returns. An
    author proof of a changed keyring is dropped, since it no longer matches. Raises Unavailable."""
    if not kem_keys:
        return 0
    removed = 0
    async for key in _keyrings(services):
        while True:
            found = await services.store.get(key)
            if not isinstance(found, StoredObject):
                break
            try:
                document = _core.read_document(found.body)
            except DocumentCorrupt:
                break
            data = orjson.loads(document.data)
            count = _drop(data, kem_keys)
            if count and not dry_run:
                body = _core.decode_push(orjson.dumps({"data": data, "baseHash": document.hash}))
                try:
                    await services.documents.push(key, body, None, ref_of(key))
                except Conflict:
                    continue
            removed += count
            break
    return removed


async def _keyrings(services: PluginContext) -> AsyncIterator[str]:
    """Yield the keys of all keyrings, each once."""
    collections = [collection for _, _, collection in services.config.each_collection()]
    seen = set[str]()
    for template in set(keyring_templates(collections)):
        folder = template.prefix if template.params else template.prefix.rpartition("/")[0]
        async for listed in services.store.walk(folder):
            if template.matches(listed.key) and listed.key not in seen:
                seen.add(listed.key)
                yield listed.key


def _drop(data: Any, kem_keys: Collection[str]) -> int:
    """Remove the entries of these recipients from the data of a keyring, and return their number; 0 for any
    other document."""
    epochs = data.get("epochs") if isinstance(data, dict) else None
    count = 0
    for epoch in epochs.values() if isinstance(epochs, dict) else ():
        entries = epoch.get("wrappedKeys") if isinstance(epoch, dict) else None
        if isinstance(entries, list):
            kept = [one for one in entries if not (isinstance(one, dict) and one.get("subKem") in kem_keys)]
            count += len(entries) - len(kept)
            epoch["wrappedKeys"] = kept
    return count
