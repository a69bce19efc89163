"""Spaces: the roles that a space's access document gives (docs/reference/protocol.md#spaces).

The document at `auth.spaces.accessPath` is `{"owner": userId, "members": [userId...]}`. Its owner has the
roles `space:owner` and `space:member`, its members have `space:member`. Without the document no caller has
either, unless `trustOnFirstUse` is set. The document is read for every request and never cached.
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
from pysync.store import NotModified, Store, StoredObject

ROLE_TIMEOUT_S = 5.0
"""Time limit for determining roles (docs/reference/protocol.md#spaces)."""

OWNER = "space:owner"
MEMBER = "space:member"

_is_space_id = re.compile(r"[A-Za-z0-9_-]+").fullmatch


@dataclass(frozen=True, slots=True)
class Membership:
    """The owner and members that an access document names. All other identities have `default_roles`."""

    owner: str | None
    members: frozenset[str]
    default_roles: frozenset[str] = frozenset()

    def roles(self, identity: str) -> frozenset[str]:
        """Return the roles of `identity`, which is not empty."""
        if identity == self.owner:
            return frozenset({OWNER, MEMBER})
        return frozenset({MEMBER}) if identity in self.members else self.default_roles


_NO_MEMBERS: Final = Membership(None, frozenset())
_UNCLAIMED: Final = Membership(None, frozenset(), frozenset({OWNER, MEMBER}))


class Spaces:
    """The spaces of one service. `settings` is None if it has none."""

    def __init__(
        self, settings: Settings | None, store: Store, corruption: CorruptionReporter | None = None
    ) -> None:
        self._store = store
        self._corruption = corruption or CorruptionReporter()
        self._param = "" if settings is None else settings.param
        self._template = KeyTemplate.of("" if settings is None else settings.access_path)
        self._trusts_on_first_use = settings is not None and settings.trust_on_first_use

    def params(self, policy: AccessPolicy) -> list[str]:
        """Return the path parameters on which the roles of `policy` depend, if any."""
        if not policy.uses_space_roles:
            return []
        return [name for name in policy.collection.path_template.params if name in self._template.params]

    async def is_member(self, identity: str, space: str) -> bool:
        """Return True if `identity` belongs to this space. Raises AuthorizationError if its access document
        cannot be read, RolesUnavailable after 5 s."""
        key = self.access_document_key({self._param: space}) if self._param else None
        if key is None:
            return False
        membership = self.membership(key, await self._read(key))
        if membership is None:
            raise AuthorizationError
        return MEMBER in membership.roles(identity)

    def access_document_key(self, params: Mapping[str, str]) -> str | None:
        """Return the key of the access document of the space of `params`; None if they name no space."""
        space = params.get(self._param)
        if space is None or not _is_space_id(space):
            return None
        try:
            return self._template.fill(params)
        except KeyError:
            return None

    def membership(self, key: str, stored: bytes | None) -> Membership | None:
        """Return the members of a space from its access document, which is stored at `access_document_key`
        (None: it does not exist). Return None if the document is corrupt. A document that names no owner
        gives no roles."""
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

    def memberships(self, found: Mapping[str, StoredObject | str | None]) -> dict[str, Membership | None]:
        """Return the members of spaces from their access documents in `found`, by key; None for a document
        that is corrupt, or whose value is the text of the error with which reading it failed."""
        return {
            key: None if isinstance(stored, str) else self.membership(key, stored and stored.body)
            for key, stored in found.items()
        }

    async def load_membership(
        self, policy: AccessPolicy, caller: Caller, params: Mapping[str, str]
    ) -> dict[str, Membership | None]:
        """Read the access document that decides on the roles of `caller`, for `add_space_roles`; `{}` if
        there is none to read. Raises AuthorizationError if it cannot be read, RolesUnavailable after 5 s."""
        key = self._deciding_key(policy, caller, params)
        return {} if key is None else {key: self.membership(key, await self._read(key))}

    def add_space_roles(
        self,
        policy: AccessPolicy,
        caller: Caller,
        params: Mapping[str, str],
        memberships: Mapping[str, Membership | None],
    ) -> Caller:
        """Return `caller` with its roles in the space of `params`, if `policy` uses such roles. `memberships`
        has the members of that space. Raises AuthorizationError if they are unknown."""
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
        """Return `caller` with its roles for a push of `text` to the document at `key`, as `add_space_roles`
        does. A push that can only create an access document, and that names the caller as its owner, also
        gets the owner's role. Raises as `load_membership`."""
        access_key = self._deciding_key(policy, caller, params)
        if access_key is None:
            return caller
        stored = await self._read(access_key)
        caller = self.add_space_roles(
            policy, caller, params, {access_key: self.membership(access_key, stored)}
        )
        if stored is None and key == access_key and _creates_space(text, caller.identity):
            return add_roles(caller, frozenset({OWNER}))
        return caller

    def _deciding_key(self, policy: AccessPolicy, caller: Caller, params: Mapping[str, str]) -> str | None:
        """Return the key of the access document that decides on the caller's roles; None if none does."""
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
    """Return `caller` with additional `roles`."""
    return replace(caller, roles=caller.roles | roles, given=caller.given | roles) if roles else caller


def _data(stored: bytes) -> dict[str, object]:
    """Return the data of an access document, in a document envelope or, if another program wrote it, bare;
    `{}` if it is neither. Raises DocumentCorrupt if it carries a hash that does not match."""
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
    # A push with another base could overwrite a document that another caller creates meanwhile.
    return not body.base_hash and orjson.loads(body.data).get("owner") == identity
