"""Spaces: the roles that a space's access document gives (docs/reference/protocol.md#spaces).

The document at `auth.spaces.accessPath` is `{"owner": userId, "members": [userId...]}`. Its owner holds
`space:owner` and `space:member`, its members `space:member`, and where it is absent nobody holds either: no
read is trusted on first use unless `trustOnFirstUse` says so. It is read for every request, never remembered.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import orjson

from pysync import _core
from pysync.auth.policy import AccessPolicy
from pysync.config import SpacesConfig as Settings
from pysync.config.key_templates import KeyTemplate
from pysync.corruption import CorruptionReporter
from pysync.errors import (
    AuthorizationError,
    DocumentCorrupt,
    PysyncError,
    RolesUnavailable,
    StoreUnavailable,
)
from pysync.model import Caller
from pysync.store import NotModified, Store

ROLE_TIMEOUT_S = 5.0
"""How long roles may take to be told (docs/reference/protocol.md#spaces)."""

OWNER = "space:owner"
MEMBER = "space:member"

_is_space_id = re.compile(r"[A-Za-z0-9_-]+").fullmatch


@dataclass(frozen=True, slots=True)
class Membership:
    """Whom an access document gives roles. `default_roles` are everybody's."""

    owner: str | None
    members: frozenset[str]
    default_roles: frozenset[str] = frozenset()

    def roles(self, identity: str) -> frozenset[str]:
        """The roles of `identity`, which is not empty."""
        if identity == self.owner:
            return frozenset({OWNER, MEMBER})
        return frozenset({MEMBER}) if identity in self.members else self.default_roles


_NO_MEMBERS: Final = Membership(None, frozenset())
_UNCLAIMED: Final = Membership(None, frozenset(), frozenset({OWNER, MEMBER}))


class Spaces:
    """The spaces of one service; `settings` None: it has none."""

    def __init__(
        self, settings: Settings | None, store: Store, corruption: CorruptionReporter | None = None
    ) -> None:
        self._store = store
        self._corruption = corruption or CorruptionReporter()
        self._param = "" if settings is None else settings.param
        self._template = KeyTemplate.of("" if settings is None else settings.access_path)
        self._trusts_on_first_use = settings is not None and settings.trust_on_first_use

    def params(self, policy: AccessPolicy) -> list[str]:
        """The path parameters that decide on the roles of `policy`, where any do."""
        if not policy.uses_space_roles:
            return []
        return [name for name in policy.collection.path_template.params if name in self._template.params]

    def access_document_key(self, params: Mapping[str, str]) -> str | None:
        """Where the access document of the space is that a path with `params` belongs to; None: to none."""
        space = params.get(self._param)
        if space is None or not _is_space_id(space):
            return None
        try:
            return self._template.fill(params)
        except KeyError:
            return None

    def membership(self, key: str, stored: bytes | None) -> Membership | None:
        """Return the members of a space by its access document, which is stored at `access_document_key`
        (None: there is none); None if that is corrupt. A document that names no owner gives nobody a role."""
        if stored is None:
            return _UNCLAIMED if self._trusts_on_first_use else _NO_MEMBERS
        try:
            data = _data(stored)
        except DocumentCorrupt as error:
            self._corruption.report_once(error, "document", key)
            return None
        owner, members = data.get("owner"), data.get("members")
        if not isinstance(owner, str):
            return _NO_MEMBERS
        named = members if isinstance(members, list) else []
        return Membership(owner, frozenset(name for name in named if isinstance(name, str)))

    def memberships(self, found: Mapping[str, bytes | str | None]) -> dict[str, Membership | None]:
        """Return the members of spaces by the access documents `found` at their keys, or the texts of the
        errors that kept these from being read; None where nobody can tell."""
        return {
            key: None if isinstance(stored, str) else self.membership(key, stored)
            for key, stored in found.items()
        }

    async def load_membership(
        self, policy: AccessPolicy, caller: Caller, params: Mapping[str, str]
    ) -> dict[str, Membership | None]:
        """Read the access document that decides on the roles of `caller`, for `add_space_roles`; `{}` where
        none does.

        Raises AuthorizationError where it cannot be read, RolesUnavailable where that takes longer than 5 s.
        """
        key = self._deciding_key(policy, caller, params)
        return {} if key is None else {key: self.membership(key, await self._read(key))}

    def add_space_roles(
        self,
        policy: AccessPolicy,
        caller: Caller,
        params: Mapping[str, str],
        memberships: Mapping[str, Membership | None],
    ) -> Caller:
        """`caller` with its roles in the space of `params`, as far as `policy` asks for such roles.
        `memberships` holds the members of that space. Raises AuthorizationError where nobody can tell."""
        key = self._deciding_key(policy, caller, params)
        if key is None:
            return caller
        membership = memberships.get(key)
        if membership is None:
            raise AuthorizationError
        return add_roles(caller, membership.roles(caller.identity))

    async def add_space_roles_for_push(
        self, policy: AccessPolicy, caller: Caller, params: Mapping[str, str], key: str, text: bytes
    ) -> Caller:
        """`add_space_roles`, for a push of `text` to the document at `key`. Whoever makes a space owns it: a
        push that can only create its access document, and names the caller its owner, is its owner's. Raises
        as `load_membership`."""
        access_key = self._deciding_key(policy, caller, params)
        if access_key is None:
            return caller
        stored = await self._read(access_key)
        caller = self.add_space_roles(policy, caller, params, self.memberships({access_key: stored}))
        if stored is None and key == access_key and _creates_space(text, caller.identity):
            return add_roles(caller, frozenset({OWNER}))
        return caller

    def _deciding_key(self, policy: AccessPolicy, caller: Caller, params: Mapping[str, str]) -> str | None:
        """The key of the access document that decides on the roles of `caller`; None: none does."""
        return self.access_document_key(params) if policy.uses_space_roles and caller.identity else None

    async def _read(self, key: str) -> bytes | None:
        try:
            async with asyncio.timeout(ROLE_TIMEOUT_S):
                found = await self._store.get(key)
        except TimeoutError:
            raise RolesUnavailable from None
        except StoreUnavailable as error:
            raise AuthorizationError from error
        return None if found is None or isinstance(found, NotModified) else found.body


def add_roles(caller: Caller, roles: frozenset[str]) -> Caller:
    """`caller` with `roles` beside its own."""
    return replace(caller, roles=caller.roles | roles, given=caller.given | roles) if roles else caller


def _data(stored: bytes) -> dict[str, object]:
    """The data of an access document, wrapped or, if others put it there, bare; `{}` if it is neither. Raises
    DocumentCorrupt if it carries a hash that is not its own."""
    try:
        found: dict[str, object] = orjson.loads(_core.read_document(stored).data)
        return found
    except DocumentCorrupt:
        if _core.is_document(stored):
            raise
        try:
            members = orjson.loads(stored)
        except ValueError:
            return {}
        if not isinstance(members, dict):
            return {}
        data = members.get("data")
        if isinstance(data, dict) and "hash" in members:
            raise
        return data if isinstance(data, dict) else members


def _creates_space(text: bytes, identity: str) -> bool:
    try:
        body = _core.decode_push(text)
    except PysyncError:
        return False
    # A push with another base could overwrite what somebody else creates meanwhile.
    return not body.base_hash and orjson.loads(body.data).get("owner") == identity
