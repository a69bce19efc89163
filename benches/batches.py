"""Batches of events, as an analytics library sends them: what the workload `events` pushes.

The batches are all different: 256 are made, 100 events each with properties of its own, and whenever one is
used its events get new message ids.
"""

import os
import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, Final

import orjson

EVENTS: Final = 100
BATCHES: Final = 256
_ID_BYTES: Final = 12
_NAMES: Final = (
    ("Page Viewed", 30),
    ("Bed Sown", 12),
    ("Bed Watered", 20),
    ("Note Opened", 15),
    ("Note Edited", 9),
    ("List Shared", 4),
    ("Search Made", 6),
    ("Plant Added", 3),
    ("Sign In", 1),
)
_PAGES: Final = ("/", "/beds", "/beds/north", "/notes", "/notes/peas", "/calendar", "/shop?sort=new")
_SYSTEMS: Final = ("iOS 19.1", "Android 17", "macOS 16", "Windows 11", "Linux")
_LANGUAGES: Final = ("en-GB", "de-DE", "fr-FR", "ja-JP", "pt-BR")


def event_batches(count: int) -> Iterator[bytes]:
    """So many bodies of pushes, put together as they are taken, out of what is made at once."""
    made = [_template(seed) for seed in range(BATCHES)]
    return (_with_ids(template) for template in islice(cycle(made), count))


def _with_ids(template: bytes) -> bytes:
    ids = os.urandom(_ID_BYTES * EVENTS).hex().encode()
    step = 2 * _ID_BYTES
    return template % tuple(ids[start : start + step] for start in range(0, len(ids), step))


def _template(seed: int) -> bytes:
    """The body of a push, with a place for each message id."""
    chance = random.Random(seed)
    events = orjson.dumps([_event(chance, second) for second in range(EVENTS)])
    return b'{"data":{"events":' + events.replace(b"%", b"%%").replace(b"<id>", b"%b") + b'},"baseHash":null}'


def _event(chance: random.Random, second: int) -> dict[str, Any]:
    """One event: nine members that have columns, and one that has none."""
    names, weights = zip(*_NAMES, strict=True)
    return {
        "event_type": "track",
        "event": chance.choices(names, weights)[0],
        "distinct_id": f"u{chance.getrandbits(32):08x}",
        "anonymous_id": f"{chance.getrandbits(64):016x}",
        "ts": f"2026-11-22T08:{second // 60:02}:{second % 60:02}.{chance.randrange(1000):03}Z",
        "message_id": "<id>",
        "properties": {
            "page": chance.choice(_PAGES),
            "seconds": round(chance.expovariate(0.1), 2),
            "beds": chance.randrange(9),
        },
        "context": {
            "os": chance.choice(_SYSTEMS),
            "locale": chance.choice(_LANGUAGES),
            "screen": [chance.choice((390, 430, 1440)), chance.choice((844, 932, 900))],
        },
        "dt": "2026-11-22",
        "session": chance.getrandbits(31),
    }
