"""Collections as a configuration declares them: one way to make them, and the usual five."""

from typing import Any

PUBLIC = {"readRoles": ["public"], "writeRoles": ["public"]}
OWN = {"readRoles": ["self"], "writeRoles": ["self"]}
ROOM = {"readRoles": ["cap:read:rooms"], "writeRoles": ["cap:write:rooms"]}
UNSIGNED = {"requireAuthorSignature": False}
"""An append-only log that anybody may append to without a signature."""


def collection(name: str, path: str | None = None, /, **members: Any) -> dict[str, Any]:
    """A collection at `path`, else at `name`/{id}; public where `members` say nothing of roles."""
    return {"name": name, "storagePath": path or f"{name}/{{id}}", **PUBLIC, **members}


def limit_of(requests: int, **members: Any) -> dict[str, Any]:
    """A rate limit whose window, which begins at a multiple of its length, does not end during a test."""
    return {"windowMs": 2**50, "maxRequests": requests, **members}


NOTES = collection("notes")
MINE = collection("mine", "u/{identity}/{id}", **OWN)
ROOMS = collection("rooms", "rooms/{room}", **ROOM)
LOG = collection("log", appendOnly=UNSIGNED)
