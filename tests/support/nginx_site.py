"""What the tests behind nginx share."""

from typing import Any

import aiohttp

from support.clients import SUBJECT, Signed, root_device

PUBLIC = {"readRoles": ["public"], "writeRoles": ["public"]}
OWN = {"readRoles": ["self"], "writeRoles": ["self"]}
ME = SUBJECT.user_id
SERVICE: dict[str, Any] = {
    "server": {"trustedProxyHops": 1},
    "collections": [
        {"name": "notes", "storagePath": "notes/{id}", "maxBodyBytes": 4096, **PUBLIC},
        {"name": "mine", "storagePath": "u/{identity}/{id}", "listable": True, **OWN},
        {
            "name": "log",
            "storagePath": "log/{identity}/{id}",
            "appendOnly": {"requireAuthorSignature": False},
            **OWN,
        },
        {
            "name": "counted",
            "storagePath": "counted/{id}",
            "rateLimit": {"pull": {"windowMs": 3_600_000, "maxRequests": 3, "bucket": "ip"}},
            **PUBLIC,
        },
    ],
}


def signer(base: str, session: aiohttp.ClientSession) -> Signed:
    return Signed(base, session, SUBJECT, root_device(SUBJECT))
