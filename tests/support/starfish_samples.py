"""Documents as Starfish stores them."""

import json
from typing import Any

from support import reference
from support.append_log_nodes import log_of, numbered

LOG = log_of(numbered(60), 1_700_000_000_000)


def stored(data: dict[str, Any], hash_: str | None = None) -> dict[str, Any]:
    """A document as Starfish's servers write it."""
    return {
        "v": 1,
        "data": data,
        "ts": 1_700_000_000_000,
        "hash": hash_ or reference.content_hash(json.dumps(data).encode()),
    }
