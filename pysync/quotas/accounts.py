"""Accounts: who a document, log or file counts for, by its key and its writer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from pysync import _core
from pysync.cache import BoundedCache
from pysync.config import Collection, Config
from pysync.config.key_templates import RESERVED, KeyTemplate, TemplateIndex
from pysync.config.roles import SHARED
from pysync.engine import history
from pysync.engine.append_log.head import LogSettings
from pysync.errors import DocumentCorrupt
from pysync.model import Caller
from pysync.store import Account, Charge

NOBODY: Final = Charge(elements=0, checked=False)
"""What the server's own objects count as."""
_BY_KEY: Final = Charge()

ChargeOfCaller = Callable[[Sequence[str], Caller], Charge]
"""Returns what a document counts as that a caller writes to a route, by the values of its parameters."""

_OWN_ROLES: Final = "self:", "admin:", f"{SHARED}:"
_SPACE_ROLES: Final = "space:", "admin:"
"""The beginnings of roles with a colon, with which nobody but an identity and those that it lets in, or the
members of a space, write."""
_MEMBERS: Final = frozenset({"space:owner", "space:member"})


class _Owned(NamedTuple):
    """A collection whose documents have an account. `rank` orders collections that own the same key."""

    rank: int
    template: KeyTemplate
    namespace: str
    name: str
    space_param: str | None
    collection: Collection

    def account(self, params: Mapping[str, str]) -> Account:
        """Return the account of a document whose writer is not known: the identity or the space of its key if
        nobody else may write there."""
        identity, space = None, None
        if _are_all(self.collection.write_roles, _OWN_ROLES):
            identity = params.get("identity")
        if self.space_param is not None and _are_all(self.collection.write_roles, _SPACE_ROLES):
            space = params.get(self.space_param)
        return Account(self.namespace, self.name, identity, space)


def _are_all(roles: Sequence[str], kinds: tuple[str, ...]) -> bool:
    return bool(roles) and all(f"{role}:".startswith(kinds) for role in roles)


class _OwnedKey(NamedTuple):
    """The charge of the object at a key, and the collection that the key counts for."""

    charge: Charge
    collection: Collection | None


class Accounts:
    """The accounts of one configuration. `file_templates` are the key templates and suffixes of collections
    whose files a plugin stores, by their names. With `by_key` a write counts for the account of its key,
    whoever writes; otherwise for its writer, and for the space of its key if the writer is a member. Appends,
    which change the object of all writers of a log, always count for the account of the key."""

    def __init__(
        self, config: Config, file_templates: Mapping[str, tuple[str, str]], *, by_key: bool = False
    ) -> None:
        self._by_key = by_key
        self._file_templates = file_templates
        self.use(config)

    def of(self, config: Config) -> "Accounts":
        """Return the accounts of another configuration."""
        return Accounts(config, self._file_templates, by_key=self._by_key)

    def use(self, config: Config) -> None:
        """Be the accounts of another configuration. Other threads may call `charge_of` meanwhile."""
        self._config = config
        spaces = config.auth.spaces
        self._space_param = None if spaces is None else spaces.param
        by_suffix: dict[str, TemplateIndex[_Owned]] = {}
        for rank, (namespace, _, collection) in enumerate(config.each_collection()):
            text, suffix = self._file_templates.get(collection.name, (collection.key_template.text, ""))
            template = KeyTemplate.of(text)
            name = qualified_name(namespace, collection.name)
            owned = _Owned(rank, template, namespace, name, self._space_param, collection)
            by_suffix.setdefault(suffix, TemplateIndex()).add(template, owned)
        self._by_suffix, self._keys = by_suffix, BoundedCache[str, _OwnedKey]()

    def of_route(self, namespace: str | None, collection: Collection) -> ChargeOfCaller:
        """Return the function that gives the charges of writes to the routes of a collection."""
        if self._by_key:
            return lambda values, caller: _BY_KEY
        name, prefix = qualified_name(namespace or "", collection.name), namespace or ""
        template = collection.key_template
        owned = _Owned(0, template, prefix, name, self._space_param, collection)
        is_log = collection.append_only is not None
        params = template.params
        space_at = params.index(self._space_param) if self._space_param in params else None
        owner_at = params.index("identity") if "identity" in params else None
        writers = frozenset(collection.write_roles)

        def charge(values: Sequence[str], caller: Caller) -> Charge:
            claims, identity = caller.claims, caller.identity or None
            issuer = None if claims is None else claims.issuer
            owner = None if owner_at is None else values[owner_at]
            if claims is not None and claims.issuer_id == owner and writers & claims.shared:
                identity = owner  # who has let the caller in
            if is_log:
                account = owned.account(dict(zip(params, values, strict=True)))
                return Charge(account._replace(issuer=issuer))
            is_member = space_at is not None and not _MEMBERS.isdisjoint(caller.roles)
            space = values[space_at] if is_member and space_at is not None else None
            return Charge(Account(prefix, name, identity, space, issuer))

        return charge

    def charge_of(self, key: str) -> Charge:
        """Return what an object counts as of which only the key is known. If several namespaces have a
        collection for the key, it counts for the first by name, the root before all. An entry of a history
        counts for whom its document does."""
        if key.startswith(f"{history.PREFIX}/"):
            return self.charge_of(history.document_of(key))._replace(elements=0)
        if key.startswith(f"{RESERVED}/"):
            return NOBODY
        return self._owned_key(key).charge

    def collection_of(self, key: str) -> Collection | None:
        """Return the collection that the key counts for."""
        return self._owned_key(key).collection

    def is_log(self, key: str) -> bool:
        """Return True if the object at a key is the head of a log."""
        collection = self._owned_key(key).collection
        return collection is not None and collection.append_only is not None

    def head_of(self, key: str, body: bytes) -> _core.LogHead | None:
        """Return the head of the log at a key; None if the key is no log's, or the head is damaged."""
        collection = self._owned_key(key).collection
        if collection is None or collection.append_only is None:
            return None
        try:
            return _core.LogHead.read(body, LogSettings.from_collection(collection).field)
        except DocumentCorrupt:
            return None

    def log_prefixes(self) -> list[str]:
        """Return the prefixes of the keys of all logs."""
        templates = [
            found.key_template for _, _, found in self._config.each_collection() if found.append_only
        ]
        return sorted({KeyTemplate("/".join(template.segments[:-1])).prefix for template in templates})

    def _owned_key(self, key: str) -> _OwnedKey:
        keys = self._keys  # those of the templates below, or of earlier ones
        found = keys.get(key)
        if found is None:
            owner = self._owner(key)
            account = None if owner is None else owner[0].account(owner[1])
            found = _OwnedKey(Charge(account, checked=False), None if owner is None else owner[0].collection)
            keys.put(key, found)
        return found

    def _owner(self, key: str) -> tuple[_Owned, dict[str, str]] | None:
        found = [
            match
            for suffix, index in self._by_suffix.items()
            if key.endswith(suffix)
            for match in index.find(key.removesuffix(suffix))
        ]

        def order(match: tuple[_Owned, object]) -> tuple[str, Sequence[bool], int]:
            owned, _ = match
            return owned.namespace, owned.template.open_segments, owned.rank

        return min(found, key=order, default=None)


def qualified_name(namespace: str | None, collection: str) -> str:
    """Return the name of a collection: `namespace/name`, or the name alone at the root."""
    return f"{namespace}/{collection}" if namespace else collection
