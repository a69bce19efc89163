"""A plain Python twin of the core's append-only logs, and the layouts in which Starfish stored them.

A log is the list of its elements: what the core keeps in heads, segments and blocks must tell the same.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from pysync.errors import BodyNotObject, InvalidData, InvalidTs
from support import reference

MAX_AHEAD_MS = 300_000

Outcome = tuple[str, int] | str
"""The log's hash after an element and the element's time, or the code of the refusal."""


@dataclass(frozen=True)
class Element:
    """`ts_ms` is None in an append that leaves the time to the server."""

    ts_ms: int | None
    data: Any
    author: tuple[str, str] | None = None

    @property
    def members(self) -> dict[str, Any]:
        """The element as it is read back."""
        author = {} if self.author is None else dict(zip(AUTHOR, self.author, strict=True))
        return {"ts": self.ts_ms, "data": self.data, **author}

    @property
    def body(self) -> bytes:
        """The append body that asks for it."""
        ts = {} if self.ts_ms is None else {"ts": self.ts_ms}
        return json.dumps({**self.members, "ts": None, **ts}).encode()


AUTHOR = ("authorPubkey", "authorSignature")


@dataclass(frozen=True)
class Log:
    elements: tuple[Element, ...] = ()

    @property
    def count(self) -> int:
        return len(self.elements)

    @property
    def ts_ms(self) -> int:
        last = self.elements[-1].ts_ms if self.elements else -1
        assert last is not None
        return last

    @property
    def hash(self) -> str:
        return log_hash(self.count, self.elements[-1].data) if self.elements else ""

    def append(
        self, wanted: list[Element], now_ms: int, max_count: int | None
    ) -> tuple["Log", list[Outcome]]:
        elements, outcomes = list(self.elements), list[Outcome]()
        last = self.ts_ms
        for element in wanted:
            if element.ts_ms is not None and element.ts_ms > now_ms + MAX_AHEAD_MS:
                outcomes.append("ts_too_far_ahead")
            elif max_count is not None and len(elements) >= max_count:
                outcomes.append("append_limit_exceeded")
            elif element.ts_ms is not None and element.ts_ms <= last:
                outcomes.append("non_monotonic_timestamp")
            else:
                last = max(now_ms, last + 1) if element.ts_ms is None else element.ts_ms
                elements.append(replace(element, ts_ms=last))
                outcomes.append((log_hash(len(elements), element.data), last))
        return Log(tuple(elements)), outcomes

    def within(
        self, since: int | None = None, newest: int | None = None, oldest: int | None = None
    ) -> list[dict[str, Any]]:
        """The elements with a ts above `since`, of those the `newest` or else the `oldest`."""
        found = [
            element.members
            for element in self.elements
            if since is None or (element.ts_ms is not None and element.ts_ms > since)
        ]
        if newest is not None:
            return found[max(0, len(found) - newest) :]
        return found if oldest is None else found[:oldest]


def log_hash(count: int, last: Any) -> str:
    """The hash of a log of `count` elements, `last` being the newest one's data."""
    return hashlib.sha256(reference.canonical({"n": count, "last": last}).encode()).hexdigest()


def decode_append(body: bytes) -> tuple[bytes, bytes, int | None, str | None, str | None]:
    """`data` exact and canonical, `ts`, and both author members of an append body."""
    members = reference.parse(body)
    if not isinstance(members, dict):
        raise BodyNotObject
    data = members.get("data")
    if not isinstance(data, dict):
        raise InvalidData
    ts = members.get("ts")
    if ts is not None:
        # By its value: 1.0 and 1e3 are integers as well.
        text = reference.exact(ts)
        if not re.fullmatch(r"[0-9]+|[0-9.]+e\+[0-9]+", text):
            raise InvalidTs
        ts = min(int(text) if text.isdecimal() else 2**64, 2**64 - 1)
    pubkey, signature = (members.get(name) for name in AUTHOR)
    if not isinstance(pubkey, str) or not isinstance(signature, str):
        pubkey = signature = None
    data = reference.sanitized(data)
    return reference.exact(data).encode(), reference.canonical(data).encode(), ts, pubkey, signature


def starfish_document(log: Log, field: str = "items", extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """A log as Starfish stores it in one document."""
    data = {**(extra or {}), field: log.within()}
    return {"v": 1, "data": data, "ts": log.ts_ms, "hash": log.hash}


def starfish_chunks(
    log: Log, key: str, chunk_size: int, extra: dict[str, Any] | None = None, behind: int = 0
) -> dict[str, Any]:
    """A log as Starfish stores it in chunks: the values to store, by key. The head does not know of the
    `behind` newest elements, as after a crash between the two writes of an append."""
    elements = log.within()
    chunks = [elements[at : at + chunk_size] for at in range(0, len(elements), chunk_size)]
    stored: dict[str, Any] = {f"{key}__seg/{chunk[0]['ts']:016}": chunk for chunk in chunks}
    known = Log(log.elements[: log.count - behind])
    first = (known.count - 1) // chunk_size * chunk_size
    stored[key] = {
        "v": 1,
        "seg": True,
        "data": extra or {},
        "n": known.count,
        "sealedN": first,
        "ts": known.ts_ms,
        "hash": known.hash,
        "chunkSize": chunk_size,
        "tailKey": f"{key}__seg/{elements[first]['ts']:016}",
    }
    return stored
