"""The keyring fold: a document's `_keyring` sibling in the same answer (wire section 4)."""

import orjson

from pysync.access import Rule
from pysync.documents import Documents
from pysync.errors import PysyncError
from pysync.model import Caller
from pysync.server.routes import Match, RouteTable, document_key
from pysync.spaces import Spaces


class Keyrings:
    """Finds the keyrings of documents. `prefixes` are the paths under which collections are pulled."""

    def __init__(self, documents: Documents, spaces: Spaces, routes: RouteTable, prefixes: list[str]) -> None:
        self._documents = documents
        self._spaces = spaces
        self._routes = routes
        self._prefixes = prefixes

    async def fold(self, match: Match, caller: Caller, now_ms: int) -> bytes | None:
        """The JSON text of the answer's `keyring` member: `null` where none is stored. None where the caller
        may not read it: its scope, or the roles of the collections that own the key, do not allow it."""
        key = _keyring_key(match)
        owners = self._owners(key)
        if owners:
            if not any([await self._permits(rule, caller, owner, key) for rule, owner in owners]):
                return None
        elif caller.scope is not None and not caller.scope.allows(key):
            return None
        ttl_ms = owners[0][0].collection.ttl_ms if owners else None
        keyring = await self._documents.pull(key, ttl_ms)
        if keyring is None:
            return b"null"
        entry = {"data": orjson.Fragment(keyring.data), "hash": keyring.hash, "timestamp": now_ms}
        return orjson.dumps(entry)

    async def _permits(self, rule: Rule, caller: Caller, owner: Match, key: str) -> bool:
        """Whether `caller`, with its roles in the space that the key belongs to, may read it."""
        if rule.by_space:
            caller = await self._spaces.enriched(rule, caller, owner.params)
        return rule.permits(caller, owner.identity, key)

    def _owners(self, key: str) -> list[tuple[Rule, Match]]:
        """What the collections ask that own `key`, each with the match whose parameters are the key's."""
        bundled, _, name = key.rpartition("/")
        found = []
        for prefix in self._prefixes:
            owner = self._pulled(f"{prefix}/pull/{key}")
            if owner is not None and not owner.route.members:
                found.append((owner.rule, owner))
            bundle = self._pulled(f"{prefix}/pull/{bundled}")
            if bundle is not None:
                members = [rule for rule in bundle.route.members if rule.collection.name == name]
                found += [(rule, bundle) for rule in members]
        return found

    def _pulled(self, path: str) -> Match | None:
        try:
            return self._routes.match("GET", path)
        except PysyncError:
            return None


def _keyring_key(match: Match) -> str:
    template = match.rule.collection.keyring_path
    if template is None:
        return f"{match.key}/_keyring"
    return document_key(template.split("/"), match.params)
