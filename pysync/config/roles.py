"""The roles that a collection names (docs/reference/protocol.md#roles)."""

from collections.abc import Iterator
from typing import Final

from pysync.config.collection import Collection
from pysync.config.convert import join

SHARED: Final = "delegated:{identity}"
"""The kind of the roles of callers whose certificate the `{identity}` of the path has issued."""


def role_lists(collection: Collection) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every list of roles, with the name of its member."""
    yield "readRoles", collection.read_roles
    yield "writeRoles", collection.write_roles
    yield "deleteRoles", collection.delete_roles or ()
    yield "historyRoles", collection.history_roles or ()
    for name, permission in collection.field_permissions.items():
        path = join("fieldPermissions", name)
        yield f"{path}.readRoles", permission.read_roles or ()
        yield f"{path}.writeRoles", permission.write_roles or ()


def needs_trust(role: str) -> bool:
    """Return True if only certificates of trusted issuers yield the role."""
    return role.startswith(("cap:", "delegated:")) and not role.startswith(f"{SHARED}:")
