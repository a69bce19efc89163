"""Members of `data` that only some roles may read or write (docs/reference/protocol.md#field-permissions)."""

from collections.abc import Mapping

import orjson

from pysync import _core
from pysync.config import FieldPermission
from pysync.errors import DocumentCorrupt, Forbidden

Permissions = Mapping[str, FieldPermission]


def hidden_fields(permissions: Permissions, roles: frozenset[str]) -> frozenset[str]:
    """Return the members that a reader with `roles` may not read."""
    return frozenset(
        name
        for name, permission in permissions.items()
        if permission.read_roles is not None and roles.isdisjoint(permission.read_roles)
    )


def redact(data: bytes, names: frozenset[str]) -> bytes:
    """Return the JSON object `data` without the members `names`; other members keep their values and order.
    Raises DocumentCorrupt if it does not parse."""
    try:
        members = orjson.loads(data)
    except ValueError as error:
        raise DocumentCorrupt from error
    return orjson.dumps({name: value for name, value in members.items() if name not in names})


def redact_elements(elements: bytes, names: frozenset[str]) -> bytes:
    """Remove the members `names` from the `data` of the elements of a log (JSON objects, separated by
    commas). An element that loses a member also loses its author proof, which would let a reader verify
    guesses. Data that is not an object is unchanged. Raises DocumentCorrupt if the elements do not parse."""
    try:
        found = orjson.loads(b"[%b]" % elements)
    except ValueError as error:
        raise DocumentCorrupt from error
    for element in found:
        if isinstance(data := element["data"], dict) and not names.isdisjoint(data):
            element.pop("authorPubkey", None)
            element.pop("authorSignature", None)
            element["data"] = {name: value for name, value in data.items() if name not in names}
    return orjson.dumps(found)[1:-1]


def check_append(permissions: Permissions, roles: frozenset[str], data: bytes) -> None:
    """Raise Forbidden if `data`, the JSON object of a new element, has a member that a writer with `roles`
    may not write. A new element has no earlier value that the member could keep."""
    locked = _read_only_fields(permissions, roles)
    named = locked.keys() & orjson.loads(data).keys() if locked else ()
    if named:
        raise _forbidden(min(named), locked[min(named)])


def check_delete(permissions: Permissions, roles: frozenset[str]) -> None:
    """Raise Forbidden if there is a member that a writer with `roles` may not write. This does not depend on
    what is stored, because the answer would show the writer if a hidden member is there."""
    locked = _read_only_fields(permissions, roles)
    if locked:
        raise _forbidden(min(locked), locked[min(locked)])


def preserve_read_only_fields(
    permissions: Permissions, roles: frozenset[str], body: _core.PushBody, current: bytes | None
) -> _core.PushBody:
    """Return the push with the members that a writer with `roles` may not write set to their values in
    `current` (the stored data, None if there is none), even if the writer cannot read them.
    Raises Forbidden if the push gives such a member another value."""
    locked = _read_only_fields(permissions, roles)
    if not locked:
        return body
    pushed = orjson.loads(body.data)
    stored = {} if current is None else orjson.loads(current)
    unseen = hidden_fields(permissions, roles)
    for name in locked.keys() & pushed.keys():
        # Confirming a guess at a hidden value would let the writer read it.
        is_same = name in stored and _canonical(pushed[name]) == _canonical(stored[name])
        if name in unseen or not is_same:
            raise _forbidden(name, locked[name])
    preserved = {name: stored[name] for name in locked.keys() & stored.keys()}
    merged = orjson.dumps({**pushed, **preserved})
    if merged == orjson.dumps(pushed):
        return body
    if body.author_signature is not None:
        raise _forbidden(min(preserved), locked[min(preserved)])
    return _core.decode_push(b'{"data":%b,"baseHash":%b}' % (merged, orjson.dumps(body.base_hash)))


def _read_only_fields(permissions: Permissions, roles: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the members that a writer with `roles` may not write, and the roles that may."""
    return {
        name: permission.write_roles
        for name, permission in permissions.items()
        if permission.write_roles is not None and roles.isdisjoint(permission.write_roles)
    }


def _canonical(value: object) -> bytes:
    """Return canonical JSON, which distinguishes values that are equal in Python, such as `True == 1`."""
    return _core.canonicalize(orjson.dumps(value))


def _forbidden(name: str, write_roles: tuple[str, ...]) -> Forbidden:
    return Forbidden(f'Forbidden: field "{name}" requires roles: {", ".join(write_roles)}')
