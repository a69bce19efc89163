"""Members of `data` that only some roles see or change (docs/reference/protocol.md#field-permissions)."""

from collections.abc import Mapping

import orjson

from pysync import _core
from pysync.config import FieldPermission
from pysync.errors import DocumentCorrupt, Forbidden

Permissions = Mapping[str, FieldPermission]


def hidden_fields(permissions: Permissions, roles: frozenset[str]) -> frozenset[str]:
    """The members that a reader with `roles` does not get to see."""
    return frozenset(
        name
        for name, permission in permissions.items()
        if permission.read_roles is not None and roles.isdisjoint(permission.read_roles)
    )


def redact(data: bytes, names: frozenset[str]) -> bytes:
    """The JSON object `data` without the members `names`; other members keep their values and order. Raises
    DocumentCorrupt where it does not read."""
    try:
        members = orjson.loads(data)
    except ValueError as error:
        raise DocumentCorrupt from error
    return orjson.dumps({name: value for name, value in members.items() if name not in names})


def redact_elements(elements: bytes, names: frozenset[str]) -> bytes:
    """Remove the members `names` from the `data` of the elements of a log (JSON objects, separated by
    commas). An element that lacks any loses its author's proof, which would verify guesses. Data that is no
    object stays as it is. Raises DocumentCorrupt if the elements do not parse."""
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
    """Raise Forbidden where `data`, the JSON object of a new element, has a member that a writer with `roles`
    may not write: nothing was there before that it could keep."""
    locked = _read_only_fields(permissions, roles)
    named = locked.keys() & orjson.loads(data).keys() if locked else ()
    if named:
        raise _forbidden(min(named), locked[min(named)])


def preserve_read_only_fields(
    permissions: Permissions, roles: frozenset[str], body: _core.PushBody, current: bytes | None
) -> _core.PushBody:
    """The push as far as a writer with `roles` may make it: members it may not write keep the value of
    `current` (the stored data, None where nothing is stored), whether the writer saw them or not.

    Raises Forbidden where the push gives such a member another value.
    """
    locked = _read_only_fields(permissions, roles)
    if not locked:
        return body
    pushed = orjson.loads(body.data)
    stored = {} if current is None else orjson.loads(current)
    unseen = hidden_fields(permissions, roles)
    for name in locked.keys() & pushed.keys():
        # To tell a writer that a value they cannot read is the right one would be to let them read it.
        is_same = name in stored and _canonical(pushed[name]) == _canonical(stored[name])
        if name in unseen or not is_same:
            raise _forbidden(name, locked[name])
    kept = {name: stored[name] for name in locked.keys() & stored.keys()}
    merged = orjson.dumps({**pushed, **kept})
    if merged == orjson.dumps(pushed):
        return body
    if body.author_signature is not None:
        raise _forbidden(min(kept), locked[min(kept)])
    return _core.decode_push(b'{"data":%b,"baseHash":%b}' % (merged, orjson.dumps(body.base_hash)))


def _read_only_fields(permissions: Permissions, roles: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """The members that a writer with `roles` may not write, and whose they are."""
    return {
        name: permission.write_roles
        for name, permission in permissions.items()
        if permission.write_roles is not None and roles.isdisjoint(permission.write_roles)
    }


def _canonical(value: object) -> bytes:
    """The text that tells values apart as JSON does: unlike Python, where `True == 1`."""
    return _core.canonicalize(orjson.dumps(value))


def _forbidden(name: str, write_roles: tuple[str, ...]) -> Forbidden:
    return Forbidden(f'Forbidden: field "{name}" requires roles: {", ".join(write_roles)}')
