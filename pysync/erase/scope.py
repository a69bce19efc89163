"""The scope of an erasure: a key, a prefix or an identity, and the keys that belong to it. For an identity
those are the keys that the templates of the configuration make with it."""

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pysync._core import split_key
from pysync.auth.certificates import is_user_id
from pysync.config import Collection, Config
from pysync.config.collection import collection_for_key
from pysync.config.key_templates import RESERVED, KeyTemplate
from pysync.engine.history import document_of, entries_of, folder_of
from pysync.plugins import FileBackedCollection
from pysync.store import DamagedFile, Store

Kind = Literal["key", "prefix", "identity"]
_KINDS: Final[tuple[Kind, ...]] = ("key", "prefix", "identity")
_KEM_KEYS: Final = "kemKeys"
is_public_key: Final = re.compile("[0-9a-f]{64}").fullmatch
"""Matches a public key, as certificates and keyrings spell it."""
IDENTITY = "identity"
"""The path parameter whose value owns a document."""


@dataclass(frozen=True, slots=True)
class EraseRequest:
    """The object at a key, everything at and below a prefix, or everything of an identity. `kem_keys` are the
    X25519 public keys of that identity, whose entries leave the keyrings of others."""

    kind: Kind
    value: str
    kem_keys: tuple[str, ...] = ()

    @classmethod
    def parse(cls, members: Mapping[str, Any]) -> Self:
        """Return the request with these members: one of `key`, `prefix` and `identity`, and perhaps
        `kemKeys`. Raises ValueError for others."""
        given: list[Kind] = [kind for kind in _KINDS if members.get(kind) is not None]
        unknown = members.keys() - {*_KINDS, _KEM_KEYS}
        if unknown or len(given) != 1:
            raise ValueError(
                f"unknown member {min(unknown)!a}" if unknown else "name one of key, prefix and identity"
            )
        (kind,) = given
        value, kem_keys = members[kind], members.get(_KEM_KEYS) or ()
        if not isinstance(value, str):
            raise ValueError(f"{kind} is not a string")
        if kind == "prefix":
            value = value.removesuffix("/")
        if kind == "identity":
            if not is_user_id(value):
                raise ValueError(
                    f"{value!a} is not an identity: name the user id that `pysync keys show` prints, 32 hex "
                    "digits in lower case; for other data name its key or prefix"
                )
        else:
            split_key(value)
            if value.partition("/")[0] == RESERVED:
                raise ValueError(f"the keys below {RESERVED} are the server's own")
        is_list = isinstance(kem_keys, list | tuple)
        if not is_list or not all(isinstance(key, str) and is_public_key(key) for key in kem_keys):
            raise ValueError(f"{_KEM_KEYS} are X25519 public keys, 64 hex digits in lower case each")
        if kem_keys and kind != "identity":
            raise ValueError(f"{_KEM_KEYS} belong to an identity")
        return cls(kind, value, tuple(kem_keys))

    @property
    def members(self) -> dict[str, Any]:
        """The members that `parse` takes."""
        return {self.kind: self.value} | ({_KEM_KEYS: list(self.kem_keys)} if self.kem_keys else {})


class Scope:
    """The keys of `request`. `stored_files` are the locations of collections that plugins store."""

    def __init__(
        self, request: EraseRequest, config: Config, stored_files: Mapping[str, FileBackedCollection]
    ) -> None:
        self._request = request
        self._namespaces = [collections for _, _, collections in config.each_namespace()]
        spaces = config.auth.spaces
        self._access = None if spaces is None else KeyTemplate.of(spaces.access_path)
        self._stored_files = stored_files
        self._others = list(_other_templates(config, stored_files))
        """Templates of what lies at other keys than those of the collections, each with a suffix."""

    def includes(self, key: str) -> bool:
        """Return True if the key belongs to the request."""
        kind, value = self._request.kind, self._request.value
        if key.partition("/")[0] == RESERVED:
            return False
        if kind != "identity":
            return key == value or (kind == "prefix" and key.startswith(value + "/"))
        owners = [
            owner.key_template
            for collections in self._namespaces
            if (owner := collection_for_key(collections, key)) is not None
        ]
        if any(template.params_of(key).get(IDENTITY) == value for template in owners):
            return True
        return any(
            key.endswith(suffix)
            and template.matches(bare := key.removesuffix(suffix))
            and template.params_of(bare)[IDENTITY] == value
            for template, suffix in self._others
        )

    def is_access_document(self, key: str) -> bool:
        """Return True if an access document of a space belongs at `key`."""
        return self._access is not None and self._access.matches(key)

    async def keys(self, store: Store) -> AsyncIterator[str]:
        """Yield the keys of the request at which something or an earlier version of it is stored, each once.
        Keys that are written meanwhile may be missing."""
        for prefix in self._prefixes():
            async for key in _keys_at(store, prefix, self.includes, below=self._request.kind != "key"):
                yield key

    async def left_in_spaces(self, store: Store) -> AsyncIterator[tuple[str, str]]:
        """Yield access documents of the request, each with a key that does not belong to the request and that
        only roles in its space protect."""
        if self._access is None:
            return
        async for access in self.keys(store):
            if not self.is_access_document(access):
                continue
            for template, suffix in self._protected(self._access.params_of(access)):
                prefix = template.prefix
                if self._request.kind == "prefix" and self.includes(prefix):
                    continue

                def is_left(key: str, template: KeyTemplate = template, suffix: str = suffix) -> bool:
                    is_of_space = key.endswith(suffix) and template.matches(key.removesuffix(suffix))
                    return is_of_space and not self.includes(key) and not self.is_access_document(key)

                async for key in _keys_at(store, prefix, is_left):
                    yield access, key

    def _protected(self, space: Mapping[str, str]) -> Iterator[tuple[KeyTemplate, str]]:
        """Yield the templates of the keys in this space whose collections have its roles, with the suffixes
        of these keys."""
        for collection in (one for collections in self._namespaces for one in collections):
            if space.keys() <= set(collection.path_template.params) and collection.uses_space_roles:
                stored = self._stored_files.get(collection.name)
                text = collection.key_template.text if stored is None else stored.template
                for name, value in space.items():
                    text = text.replace(f"{{{name}}}", value)
                yield KeyTemplate(text), "" if stored is None else stored.suffix

    def _prefixes(self) -> list[str]:
        """Return the prefixes that all these keys are at or below, none below another."""
        value = self._request.value
        if self._request.kind != "identity":
            return [value]
        templates = [
            collection.key_template for collections in self._namespaces for collection in collections
        ]
        found = {
            KeyTemplate.of(template.text.replace(f"{{{IDENTITY}}}", value)).prefix
            for template in (*templates, *(template for template, _ in self._others))
            if IDENTITY in template.params
        }
        return sorted(
            one for one in found if not any(one != other and _is_below(one, other) for other in found)
        )


def keyring_templates(collections: Iterable[Collection]) -> Iterable[KeyTemplate]:
    """Yield the templates of the keyrings of these collections."""
    for collection in collections:
        yield KeyTemplate.of(collection.keyring_path or f"{collection.storage_path}/_keyring")


def _other_templates(
    config: Config, stored_files: Mapping[str, FileBackedCollection]
) -> Iterable[tuple[KeyTemplate, str]]:
    for _, _, collection in config.each_collection():
        stored = stored_files.get(collection.name)
        found = [] if stored is None else [(KeyTemplate.of(stored.template), stored.suffix)]
        found += [(template, "") for template in keyring_templates([collection])]
        yield from ((template, suffix) for template, suffix in found if IDENTITY in template.params)


async def _keys_at(
    store: Store, prefix: str, includes: Callable[[str], bool], *, below: bool = True
) -> AsyncIterator[str]:
    """Yield the included keys at `prefix`, and `below` it, at which something or an earlier version of it is
    stored, each once."""
    is_one = bool(prefix) and includes(prefix)
    if is_one and (await is_stored(store, prefix) or await entries_of(store, prefix)):
        yield prefix
    if not below:
        return
    async for listed in store.walk(prefix):
        if includes(listed.key):
            yield listed.key
    last = prefix
    async for listed in store.walk(folder_of(prefix).removesuffix("/")):
        key = document_of(listed.key)
        if key != last and includes(key) and not await is_stored(store, key):
            yield key
        last = key


def _is_below(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(prefix + "/")


async def is_stored(store: Store, key: str) -> bool:
    """Return True if there is an object or file at `key`, also a damaged one. Raises StoreUnavailable."""
    try:
        return await store.get(key) is not None or await store.stat(key) is not None
    except DamagedFile:
        return True
