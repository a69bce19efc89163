"""The keyring fold: a document's `_keyring` sibling in the same answer (wire section 4)."""

import orjson

from pysync.documents import Documents
from pysync.errors import PysyncError
from pysync.model import Caller
from pysync.server.routes import Match, RouteTable, document_key


class Keyrings:
    """Finds the keyrings of documents. `prefixes` are the paths under which collections are pulled."""

    def __init__(self, documents: Documents, routes: RouteTable, prefixes: list[str]) -> None:
        self._documents = documents
        self._routes = routes
        self._prefixes = prefixes

    async def fold(self, match: Match, caller: Caller, now_ms: int) -> bytes | None:
        """The JSON text of the answer's `keyring` member: `null` where none is stored. None where the caller
        may not read it: its scope, or the roles of the collections that own the key, do not allow it."""
        key = _keyring_key(match)
        owners = self._owners(key)
        if owners:
            if not any(owner.rule.permits(caller, owner.identity, key) for owner in owners):
                return None
        elif caller.scope is not None and not caller.scope.allows(key):
            return None
        ttl_ms = owners[0].rule.collection.ttl_ms if owners else None
        keyring = await self._documents.pull(key, ttl_ms)
        if keyring is None:
            return b"null"
        entry = {"data": orjson.Fragment(keyring.data), "hash": keyring.hash, "timestamp": now_ms}
        return orjson.dumps(entry)

    def _owners(self, key: str) -> list[Match]:
        found = []
        for prefix in self._prefixes:
            try:
                found.append(self._routes.match("GET", f"{prefix}/pull/{key}"))
            except PysyncError:
                continue
        return found


def _keyring_key(match: Match) -> str:
    template = match.rule.collection.keyring_path
    if template is None:
        return f"{match.key}/_keyring"
    return document_key(template.split("/"), match.params)
