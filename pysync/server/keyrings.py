"""The keyring fold: a document's `_keyring` sibling in the same answer (wire section 4)."""

from collections.abc import Sequence

import orjson

from pysync.auth import field_permissions
from pysync.config.key_templates import RESERVED, document_key
from pysync.engine.documents import Documents
from pysync.errors import PysyncError
from pysync.model import ANONYMOUS, Caller
from pysync.plugins.hooks import Hooks
from pysync.server.roles import Roles, request_of
from pysync.server.routes import Match, RouteTable


class Keyrings:
    """Finds the keyrings of documents. `owners` say which collection, by its rule for pulls, a key belongs
    to: one table for each namespace, with every collection in it, pulled or not."""

    def __init__(
        self, documents: Documents, roles: Roles, hooks: Hooks, owners: Sequence[RouteTable]
    ) -> None:
        self._documents = documents
        self._roles = roles
        self._hooks = hooks
        self._owners = owners

    async def fold(self, match: Match, caller: Caller, now_ms: int) -> tuple[bytes, str] | None:
        """The JSON text of the answer's `keyring` member, `null` where none is stored, and its version. None
        where the caller may not read it: its scope, or the collections that own the key, do not allow it."""
        key = _keyring_key(match)
        if key.startswith(f"{RESERVED}/"):
            return None
        owners = self._owners_of(key)
        for owner in owners:
            reader = await self._reader(owner, caller)
            if reader is not None:
                return await self._read(key, now_ms, owner, reader)
        if owners or (caller.scope is not None and not caller.scope.allows(key)):
            return None
        return await self._read(key, now_ms)

    async def _read(
        self, key: str, now_ms: int, owner: Match | None = None, reader: Caller = ANONYMOUS
    ) -> tuple[bytes, str]:
        keyring = await self._documents.pull(key, owner.rule.collection.ttl_ms if owner else None)
        if keyring is None:
            return b"null", ""
        hidden: frozenset[str] = frozenset()
        if owner is not None:
            roles = owner.rule.roles_of(reader, owner.identity)
            hidden = field_permissions.hidden(owner.rule.collection.field_permissions, roles)
        data = field_permissions.without(keyring.data, hidden) if hidden else keyring.data
        version = await self._documents.versions.told(key, keyring.hash, keyring.ts_ms, hidden)
        entry = {"data": orjson.Fragment(data), "hash": version, "timestamp": now_ms}
        return orjson.dumps(entry), version

    async def _reader(self, owner: Match, caller: Caller) -> Caller | None:
        """`caller` with the roles that it has for the key alone; None where a pull of its own would not give
        it a document of `owner`."""
        rule = owner.rule
        collection = rule.collection
        if (
            collection.push_only
            or collection.append_only is not None
            or (caller is ANONYMOUS and not rule.admits_anonymous)
        ):
            return None
        try:
            if rule.by_request:
                caller = await self._roles.enriched(rule, caller, owner.params, owner.key)
            if not rule.permits(caller, owner.identity, owner.key):
                return None
            if self._hooks.pulls:
                await self._hooks.leave(request_of(rule, caller, owner.params, owner.key))
        except PysyncError as error:
            if error.status >= 500:
                raise
            return None
        return caller

    def _owners_of(self, key: str) -> list[Match]:
        found = []
        for table in self._owners:
            try:
                found.append(table.match("GET", f"/{key}"))
            except PysyncError:
                continue
        return found


def _keyring_key(match: Match) -> str:
    template = match.rule.collection.keyring_path
    if template is None:
        return f"{match.key}/_keyring"
    return document_key(template.split("/"), match.params)
