"""Entries of keyrings that hold a content key for one recipient. They name the X25519 key of the recipient
alone, which no other stored object ties to an identity, and the signing key of who added them."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from pysync import _core
from pysync.auth.certificates import user_id
from pysync.engine.changes import DocumentRef
from pysync.erase.request import EraseRequest, is_public_key
from pysync.erase.scope import Scope, keyring_templates
from pysync.errors import Conflict, DocumentCorrupt
from pysync.plugins import PluginContext
from pysync.store import StoredObject


@dataclass(slots=True)
class KeyringEntries:
    """What keyrings hold of an identity: the number of entries for it, the number of keyrings that have
    entries, and the keys of those with entries that it added for others."""

    removed: int = 0
    keyrings: int = 0
    signed: list[str] = field(default_factory=list)


async def remove_entries(
    services: PluginContext,
    request: EraseRequest,
    scope: Scope,
    ref_of: Callable[[str], DocumentRef | None],
    *,
    dry_run: bool = False,
) -> KeyringEntries:
    """Remove the entries for the X25519 keys of a request from all keyrings that `scope` leaves, also from
    their earlier epochs. Each change is announced as one of the document that `ref_of` returns. An author
    proof of a changed keyring is dropped, since it no longer matches. Raises Unavailable."""
    found_entries = KeyringEntries()
    if request.kind != "identity":
        return found_entries
    async for key in _keyrings(services):
        while not scope.includes(key):
            found = await services.store.get(key)
            if not isinstance(found, StoredObject):
                break
            try:
                document = _core.read_document(found.body)
            except DocumentCorrupt:
                break
            data = orjson.loads(document.data)
            count = _drop(data, request.kem_keys)
            if count and not dry_run:
                body = _core.decode_push(orjson.dumps({"data": data, "baseHash": document.hash}))
                try:
                    await services.documents.push(key, body, None, ref_of(key))
                except Conflict:
                    continue
            entries = [*_entries(data)]
            found_entries.removed += count
            found_entries.keyrings += bool(entries)
            if any(_added_by(entry) == request.value for entry in entries):
                found_entries.signed.append(key)
            break
    return found_entries


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


def _entries(data: Any) -> Iterator[dict[str, Any]]:
    """Yield the entries of a keyring; none of any other document."""
    epochs = data.get("epochs") if isinstance(data, dict) else None
    for epoch in epochs.values() if isinstance(epochs, dict) else ():
        entries = epoch.get("wrappedKeys") if isinstance(epoch, dict) else None
        if isinstance(entries, list):
            yield from (entry for entry in entries if isinstance(entry, dict))


def _added_by(entry: dict[str, Any]) -> str | None:
    """Return the user id of who added an entry; None if that is no key."""
    adder = entry.get("addedBy")
    return user_id(adder) if isinstance(adder, str) and is_public_key(adder) else None


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
