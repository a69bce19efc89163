"""The configuration of the nodes: every device with a certificate for a collection may read and write it."""

from typing import Any, Final

LIMIT: Final = {"window_ms": 10_000, "max_requests": 8}
"""Of what is `metered`, for all clients together: they have one address."""
JUDGED_LIMIT: Final = {**LIMIT, "max_requests": 8 * LIMIT["max_requests"]}
"""Until it knows of others each process may allow as many: four, and those in the place of killed ones."""
FILE_TYPE: Final = "application/octet-stream"


def _collection(name: str, **members: Any) -> dict[str, Any]:
    roles = {"readRoles": [f"cap:read:{name}"], "writeRoles": [f"cap:write:{name}"]}
    return {"name": name, "storagePath": f"{name}/{{id}}", **roles, **members}


COLLECTIONS: Final = [
    _collection("counters"),
    _collection("drafts", deletable=True),
    _collection("logs", appendOnly={"type": "by_timestamp", "requireAuthorSignature": False}),
    _collection("files", allowedMimeTypes=[FILE_TYPE], maxBodyBytes=4_000_000),
    _collection("events", storagePath="events/{app}/{batchId}", listable=True),
    _collection(
        "metered",
        rateLimit={
            "pull": {
                "bucket": "ip",
                "windowMs": LIMIT["window_ms"],
                "maxRequests": LIMIT["max_requests"],
            }
        },
    ),
]
EVENTS: Final = [{"collection": "events", "storagePath": "batches/{app}/{batchId}"}]
NAMES: Final[tuple[str, ...]] = tuple(collection["name"] for collection in COLLECTIONS)
