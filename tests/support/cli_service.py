"""The service that command lines are tested against."""

from typing import Any

from support.collections import OWN, collection

SEE_LOG = ": the server's log has the reason if `server.logRefusals` is on"
"""How the client explains 403."""
ADMIN_TOKEN = "token-of-the-tests"
SERVICE: dict[str, Any] = {
    "collections": [
        collection("public", deletable=True, history={}),
        collection("notes", "users/{identity}/notes/{id}", **OWN),
        collection("board", readRoles=["admin", "cap:read:board"], writeRoles=["admin", "cap:write:board"]),
    ],
    "auth": {"adminToken": ADMIN_TOKEN},
}
