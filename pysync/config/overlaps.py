"""Find templates with common keys, and projections, through which other callers could read or write what a
collection stores.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from pysync.config.collection import Collection, Restriction
from pysync.config.key_templates import KeyTemplate
from pysync.config.plugin_validation import owners_of, projection_name, sources_of
from pysync.config.problem import Problem
from pysync.config.roles import SHARED, needs_trust
from pysync.config.schema import Config, ProjectionConfig

_OWN_PATH_ONLY: Final = ("self", "device:root", "cap:")
"""Prefixes of roles that grant nothing on a path whose `{identity}` is not the caller's."""
_NON_OWNER_ROLES: Final = ("public", "self", "device:root", "space:member")
"""Roles of callers who need not own a space."""
_ACCESS_PATH: Final = "auth.spaces.accessPath"


class _Holders(NamedTuple):
    """The callers who have a role. `on` is what else the role depends on: trusted issuers, user ids, or the
    position of the space in the key. `whose` is the position in the key of the user id that must be theirs;
    None if there is none."""

    role: str
    on: object = None
    whose: object = None

    def include(self, other: "_Holders") -> bool:
        """Return True if these callers certainly include all of `other`."""
        if self.role == "public":
            return not self.on or other != ("public", False, None)
        if self.role == "self" and other.role.startswith(_OWN_PATH_ONLY):
            return self.whose == other.whose is not None
        is_same = self.role == other.role or (self.role, other.role) == ("space:member", "space:owner")
        return is_same and self.on == other.on and self.whose in (None, other.whose)


class _Allowed(NamedTuple):
    """The callers who may perform an action on a collection."""

    holders: frozenset[_Holders]
    root_only: bool
    restrictions: frozenset[Restriction]

    def include(self, others: "_Allowed") -> bool:
        """Return True if these callers include all of `others`. The operator never counts as another
        caller."""
        named = [one for one in others.holders if one.role != "admin"]
        if named and ((self.root_only and not others.root_only) or self.restrictions - others.restrictions):
            return False
        return all(any(one.include(other) for one in self.holders) for other in named)


class _Site(NamedTuple):
    """A collection with its namespace and its path in the file."""

    config: Config
    namespace: str
    path: str
    collection: Collection

    @property
    def keys(self) -> KeyTemplate:
        """The template of its keys."""
        return self.collection.key_template

    @property
    def name(self) -> str:
        """The collection's name, after its namespace if it has one."""
        return f"{self.namespace}/{self.collection.name}" if self.namespace else self.collection.name

    def format_roles(self, action: Literal["pull", "push"]) -> str:
        """Return the roles that the action requires, as text for people."""
        return ", ".join(dict.fromkeys(self.collection.every_role_for(action))) or "nobody"

    def format_access(self) -> str:
        """Return the roles of readers and writers, as text for people."""
        return f"read by {self.format_roles('pull')}, written by {self.format_roles('push')}"

    def allowed(
        self,
        action: Literal["pull", "push"],
        positions: Sequence[object],
        roles: tuple[str, ...] | None = None,
        keys: KeyTemplate | None = None,
    ) -> _Allowed:
        """Return the callers who may act on the collection, or only those of them who have one of `roles`.
        `positions` name the segments of its keys, or of `keys`, so that the keys of two collections can be
        compared."""
        position_of = dict(zip((keys or self.keys).segments, positions, strict=False))
        trust = self.config.trust_of(self.namespace, self.collection)
        spaces = self.config.auth.spaces
        space = spaces and tuple(
            position_of.get(f"{{{name}}}") for name in KeyTemplate.of(spaces.access_path).params
        )

        def holders(role: str) -> _Holders:
            on: object = None
            if role == "public":
                on = self.collection.require_auth is True
            elif role.startswith("space:"):
                on = space
            elif needs_trust(role):
                on = trust.issuers
            elif role not in ("self", "admin", "device:root"):
                on = frozenset(user for user, roles in trust.identity_roles.items() if role in roles)
            is_of_path = role.startswith((*_OWN_PATH_ONLY, SHARED))
            whose = position_of.get("{identity}") if is_of_path else None
            return _Holders(role, on, whose)

        if roles is None or action not in self.collection.actions:
            roles = self.collection.every_role_for(action)
        outer = self.config.namespaces[self.namespace].restrictions if self.namespace else ()
        restrictions = frozenset(
            one
            for one in (*outer, *self.collection.restrictions)
            if one.actions is None or action in one.actions
        )
        return _Allowed(frozenset(map(holders, roles)), self.collection.root_only, restrictions)


def takeovers(config: Config, path_of: Callable[[object], str]) -> Iterator[Problem]:
    """Find ways to overwrite access documents of spaces, and keyrings, for callers other than their own
    writers. `path_of` returns where a collection was written."""
    sites = [site._replace(path=path_of(site.collection)) for site in _sites(config)]
    if config.auth.spaces is not None:
        keys = KeyTemplate.of(config.auth.spaces.access_path)
        writers = _writers(sites, keys)
        owner = _owning_site(sites, keys) or next(iter(writers), None)
        if owner is not None:
            yield from _other_writers(writers, owner, owner.keys, _ACCESS_PATH)
        yield from _server_writes(config, keys, _ACCESS_PATH)
    for site in sites:
        keyrings = _keyring_template(site)
        if keyrings is not None:
            what = f"the keyrings of {site.name}"
            owner = _owning_site([one for one in sites if one.namespace == site.namespace], keyrings)
            keys = keyrings if owner is None else owner.keys
            yield from _other_writers(_writers(sites, keyrings), owner or site, keys, what)
            yield from _server_writes(config, keyrings, what)


def vanishing_access_documents(config: Config, path_of: Callable[[object], str]) -> Iterator[Problem]:
    """Find collections that would delete access documents of spaces. The next caller who creates one owns the
    space, with all that is stored in it. `path_of` returns where a collection was written."""
    if config.auth.spaces is None:
        return
    keys = KeyTemplate.of(config.auth.spaces.access_path)
    sites = [site for site in _sites(config) if site.keys.overlaps(keys)]
    for site in sites:
        reached = [
            action
            for action in ("pull", "push")
            if action in site.collection.actions
            and not any(_shadows(other, site, keys) for other in sites if action in other.collection.actions)
        ]
        for member, is_set in (
            ("ttlMs", bool(reached) and site.collection.ttl_ms is not None),
            ("deletable", "push" in reached and site.collection.deletable),
        ):
            if is_set:
                message = (
                    f"cannot be used for access documents ({_ACCESS_PATH}): without its access document a "
                    "space belongs to the next caller who makes one; `pysync erase --prefix` removes a space"
                )
                yield Problem(f"{path_of(site.collection)}.{member}", message)


def replaceable_access_documents(config: Config) -> Iterator[Problem]:
    """Find a collection of access documents that callers other than the owners of spaces may replace."""
    if config.auth.spaces is not None:
        for site in _writers(_sites(config), KeyTemplate.of(config.auth.spaces.access_path)):
            roles = [role for role in site.collection.write_roles if role in _NON_OWNER_ROLES]
            if roles:
                message = f"{', '.join(roles)} may replace the access documents of spaces ({_ACCESS_PATH})"
                yield Problem(f"{site.path}.writeRoles", message)


def shared_between_namespaces(config: Config) -> Iterator[Problem]:
    """Find collections whose keys may be those of another namespace's collection with other roles."""
    sites = _sites(config)
    for at, site in enumerate(sites):
        for other in sites[:at]:
            if other.namespace == site.namespace or not other.keys.overlaps(site.keys):
                continue
            if all(_same_callers(other, site, action) for action in ("pull", "push")):
                continue
            here, there = site.format_access(), other.format_access()
            unlike = " (under other trust)" if here == there else ""
            message = f"shares keys with {other.name}: here {here}; there {there}{unlike}"
            yield Problem(f"{site.path}.storagePath", message)


def exposed_fields(config: Config) -> Iterator[Problem]:
    """Find collections that do not hide what another one with the same keys hides by `fieldPermissions`."""
    sites = _sites(config)
    for site in sites:
        for other in sites:
            is_twin = site.keys.shape == other.keys.shape or site.namespace != other.namespace
            if other is site or not is_twin or not site.keys.overlaps(other.keys):
                continue
            for name, permission in site.collection.field_permissions.items():
                roles = _exposed_to(other.collection, name, frozenset(permission.read_roles or ("public",)))
                if roles:
                    exposure = (
                        f"{', '.join(sorted(roles))} may read it, or compute it from the document's hash"
                    )
                    message = f"{name}: {exposure}, in {other.name}, which has the same keys"
                    yield Problem(f"{site.path}.fieldPermissions", message)


def _exposed_to(collection: Collection, name: str, readers: frozenset[str]) -> frozenset[str]:
    """Return the roles from which the collection does not hide a member that only `readers` may read."""
    own = collection.field_permissions.get(name)
    if "public" in readers or (own is not None and readers.issuperset(own.read_roles or ("public",))):
        return frozenset()
    return (
        frozenset(collection.every_role_for("pull") + collection.every_role_for("push")) - readers - {"admin"}
    )


def exposed_by_projections(config: Config) -> Iterator[Problem]:
    """Find projections whose lists can be read by callers who may not read the sources, or the members taken
    from them."""
    sites = {(site.namespace, site.collection.name): site for site in _sites(config)}
    for number, projection in enumerate(config.projections):
        path, name = f"projections[{number}].target", projection_name(projection)
        for source in (sites[found] for found in sources_of(projection, config)):
            readers_by_member = {"": _readers(source, list(sites.values()))}
            readers_by_member |= {
                f" ({member})": source.allowed("pull", source.keys.segments, roles)
                for member, roles in _restricted_members(projection, source.collection)
            }
            for target in (sites[found] for found in owners_of(projection, config)):
                of_list = target.allowed("pull", projection.target.split("/"))
                for member, readers in readers_by_member.items():
                    if not readers.include(of_list):
                        roles = target.format_roles("pull")
                        only = ", ".join(sorted({one.role for one in readers.holders})) or "nobody"
                        message = f"in {target.name}, {roles} may read what is projected from {source.name}"
                        yield Problem(path, f"{message}{member}, which only {only} may read there", name)


def _restricted_members(
    projection: ProjectionConfig, source: Collection
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the projected members of the source that not all its readers may see, with the readers who may.
    Members that a function projects are unknown."""
    pointers = projection.value.values()
    taken = {pointer.split("/")[1].replace("~1", "/").replace("~0", "~") for pointer in pointers}
    for member, permission in source.field_permissions.items():
        if permission.read_roles is not None and (member in taken or "/" in pointers):
            yield member, permission.read_roles


def _sites(config: Config) -> list[_Site]:
    return [_Site(config, *found) for found in config.each_collection()]


def _owning_site(sites: Sequence[_Site], key: KeyTemplate) -> _Site | None:
    """Return the collection whose keys are exactly those of this template, preferably one that is pushed to;
    None if there is none."""
    own = [site for site in sites if site.keys.shape == key.shape]
    return min(own, key=lambda site: site.collection.pull_only, default=None)


def _writers(sites: Sequence[_Site], key: KeyTemplate) -> list[_Site]:
    """Return the collections through which a key of this template can be pushed."""
    near = [site for site in sites if not site.collection.pull_only and site.keys.overlaps(key)]
    return [site for site in near if not any(_shadows(other, site, key) for other in near)]


def _shadows(other: _Site, site: _Site, key: KeyTemplate) -> bool:
    """Return True if pushes to all keys that `site` and `key` share go to `other`, because literal segments
    win."""
    if other is site or other.namespace != site.namespace:
        return False
    parts = zip(site.keys.segments, site.keys.open_segments, key.segments, strict=True)
    shared = "/".join(theirs if is_open else mine for mine, is_open, theirs in parts)
    return other.keys.matches(shared) and other.keys.open_segments < site.keys.open_segments


def _other_writers(writers: Sequence[_Site], owner: _Site, keys: KeyTemplate, what: str) -> Iterator[Problem]:
    """Find writers who are not among those of `owner`, whose parameters are at the same positions in the key
    as in `keys`."""
    positions = range(len(keys.segments))
    allowed = owner.allowed("push", positions, keys=keys)
    for site in writers:
        if site is not owner and not allowed.include(site.allowed("push", positions)):
            others, own = site.format_roles("push"), owner.format_roles("push")
            message = f"can match {what}: {others} could replace what {owner.name} keeps for {own}"
            yield Problem(f"{site.path}.storagePath", message)


def _server_writes(config: Config, key: KeyTemplate, what: str) -> Iterator[Problem]:
    """Find lists and files of events whose keys would match the template."""
    for at, projection in enumerate(config.projections):
        if key.overlaps(KeyTemplate.of(projection.target)):
            yield Problem(f"projections[{at}].target", f"can match {what}, which no list may replace")
    for at, events in enumerate(config.events):
        if key.overlaps(KeyTemplate.of(events.storage_path)):
            yield Problem(f"events[{at}].storagePath", f"can match {what}, which no file may replace")


def _keyring_template(site: _Site) -> KeyTemplate | None:
    """Return the template of the keyrings that the collection relies on; None if it has plain documents."""
    collection = site.collection
    if collection.keyring_path is not None:
        return KeyTemplate.of(collection.keyring_path)
    is_sealed = collection.encryption == "delegated" and collection.bundle is None
    return KeyTemplate.of(f"{site.keys.text}/_keyring") if is_sealed else None


def _readers(source: _Site, sites: Sequence[_Site]) -> _Allowed:
    """Return the callers who may read writes to the source. If the source can only be pushed, these are the
    readers of its twin."""
    site = source
    if source.collection.push_only:
        like = (one for one in sites if one.namespace == source.namespace and not one.collection.push_only)
        site = next((one for one in like if one.keys.shape == source.keys.shape), source)
    return site.allowed("pull", source.keys.segments)


def _same_callers(one: _Site, other: _Site, action: Literal["pull", "push"]) -> bool:
    positions = range(len(one.keys.segments))
    callers, others = one.allowed(action, positions), other.allowed(action, positions)
    return callers.include(others) and others.include(callers)
