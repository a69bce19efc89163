"""The service that command lines are tested against."""

from typing import Any

ADMIN_TOKEN = "token-of-the-tests"
SERVICE: dict[str, Any] = {
    "collections": [
        {
            "name": "public",
            "storagePath": "public/{id}",
            "readRoles": ["public"],
            "writeRoles": ["public"],
        },
        {
            "name": "notes",
            "storagePath": "users/{identity}/notes/{id}",
            "readRoles": ["self"],
            "writeRoles": ["self"],
        },
        {
            "name": "board",
            "storagePath": "board/{id}",
            "readRoles": ["admin", "cap:read:board"],
            "writeRoles": ["admin", "cap:write:board"],
        },
    ],
    "auth": {"adminToken": ADMIN_TOKEN},
}
