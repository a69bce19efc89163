"""What each function of the core costs beside its plain Python twin (`tests/support/reference.py`).

    python -m benches.core [--quick]

Prints microseconds a call: the median of 7 rounds, the lowest and the highest.

Twins that libraries carry (OpenSSL, hashlib, json) are as fast as Python gets without the core.
"""

import argparse
import base64
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import pysync._core as core
from benches.workloads import big_document, push_body
from pysync.auth.authentication import RequestParts

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from support import reference

ROUNDS = 7
ROUND_S = 0.05
BATCH = 100
RECEIVED_AT = "2026-01-02T03:04:05.678Z"
SIGNED = 16

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A call of the core on `body_bytes`, and the same by its twin."""

    name: str
    body_bytes: int
    call: Call
    twin: Call


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    core_us: float
    core_spread_us: tuple[float, float]
    twin_us: float
    body_bytes: int

    @property
    def megabytes_per_s(self) -> float:
        return self.body_bytes / self.core_us


def microseconds(call: Call, rounds: int = ROUNDS, round_s: float = ROUND_S) -> list[float]:
    """The CPU time of one call, in each of the rounds, lowest first."""
    started = time.thread_time()
    call()
    calls = max(1, int(round_s / (time.thread_time() - started)))
    found = []
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(calls):
            call()
        found.append((time.thread_time() - started) / calls * 1e6)
    return sorted(found)


def small_body() -> bytes:
    """A note of 1 KB, as a JavaScript client sends it."""
    note = {
        "title": "Shopping list",
        "done": False,
        "count": 12,
        "tags": ["a", "b", "c"],
        "body": "Lorem ipsum dolor sit amet " * 28,
        "meta": {"updatedAt": 1_700_000_000_000, "by": "10ba682c8ad13513971e8b56881aab8b", "x": 1.5},
    }
    return json.dumps({"data": note, "baseHash": "a" * 64}, separators=(",", ":")).encode()


def large_body() -> bytes:
    """An index of 512 KiB: many small objects whose members are not in canonical order."""
    objects: list[dict[str, object]] = []
    size = 0
    while size < 512 * 1024:
        number = len(objects)
        entry: dict[str, object] = {
            "id": f"item-{number}",
            "type": "note" if number % 3 else "task",
            "parentId": None,
            "order": number,
            "title": f"Title of the thing {number}, déjà vu",
            "updatedAt": 1_700_000_000_000 + number,
            "price": number * 0.37,
            "tags": ["x", "y"],
            "meta": {"author": "10ba682c8ad13513", "emoji": "\U0001f600"},
        }
        objects.append(entry)
        size += len(json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()) + 1
    body = {"data": {"objects": objects}, "baseHash": None}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def event_batch() -> bytes:
    """The `data` of a push of 100 events, 36 KB."""
    events = [
        {
            "event_type": "track",
            "event": ("Page Viewed", "Button Clicked", "Order Completed")[number % 3],
            "distinct_id": f"user-{number * 7919 % 5000}",
            "anonymous_id": f"7311d8a3-c2ce-6f44-7ed4-{number:012x}",
            "ts": f"2026-11-22T03:04:{number % 60:02d}.{number * 37 % 1000:03d}Z",
            "message_id": f"c9e9c616-612e-7696-a6ce-{number:012x}",
            "properties": {"price": number * 0.37, "qty": number % 5, "tags": ["a", "b"], "url": "/p/17"},
            "context": {"ip": f"10.0.1.{number}", "locale": "en-US", "screen": {"h": 1080, "w": 1920}},
            "dt": "2026-11-22",
            "plan": "free",
        }
        for number in range(100)
    ]
    return core.canonicalize(json.dumps({"events": events}).encode())


def encode_events(data: bytes) -> bytes:
    return core.encode_events(data, RECEIVED_AT)


def encode_events_twin(data: bytes) -> bytes:
    """The same by orjson and pyarrow."""

    def cell(value: object) -> str:
        if value is None or type(value) is str:
            return value or ""
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()

    events = orjson.loads(data)["events"]
    columns = [[cell(event.get(name)) for event in events] for name in reference.EVENT_COLUMNS]
    known = {*reference.EVENT_COLUMNS, "received_at"}
    others = ({name: event[name] for name in event if name not in known} for event in events)
    columns.append([RECEIVED_AT] * len(events))
    columns.append(
        [orjson.dumps(each, option=orjson.OPT_SORT_KEYS).decode() if each else "" for each in others]
    )
    names = (*reference.EVENT_COLUMNS, "received_at", "extra")
    schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in names])
    file = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, schema), file, use_dictionary=False, write_statistics=False, store_schema=False
    )
    return bytes(file.getvalue())


def push_and_store(body: bytes) -> bytes:
    return core.decode_push(body).stored(1_700_000_000_000)


def push_and_store_twin(body: bytes) -> bytes:
    data, _canonical, data_hash, _base, pubkey, signature = reference.decode_push(body)
    return reference.stored(data, data_hash, 1_700_000_000_000, pubkey, signature)


def pull(stored: bytes) -> tuple[str, int, bytes]:
    document = core.read_document(stored)
    return document.hash, document.ts_ms, document.answer(1_700_000_000_000)


def signed_request(number: int, body: bytes) -> RequestParts:
    """A push that a signer of its own signed."""
    signer = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    key = core.PublicKey(signer.public_key().public_bytes_raw().hex())
    rest = ("127.0.0.1:8080", 1_700_000_000_000, "AAAAAAAAAAAAAAAAAAAAAA==")
    message = core.request_message("POST", "/push/notes/a", body, *rest)
    signature = base64.b64encode(signer.sign(message)).decode()
    return key, signature, "POST", ["/push/notes/a"], body, *rest


def cases() -> list[Case]:
    """Every call that is measured."""
    small, large, events = small_body(), large_body(), event_batch()
    escaped = push_body(big_document(seed=0))
    stored, stored_large = push_and_store(small), push_and_store(large)
    signer = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    key = signer.public_key().public_bytes_raw().hex()
    parsed = core.PublicKey(key)
    request = ("127.0.0.1:8080", 1_700_000_000_000, "AAAAAAAAAAAAAAAAAAAAAA==")
    message = core.request_message("POST", "/push/notes/a", small, *request)
    signature = base64.b64encode(signer.sign(message)).decode()
    signed_requests = [signed_request(number, small) for number in range(SIGNED)]
    paths = ["notes/**", "!notes/_keyring", "!notes/_members"]
    scope, document_key = core.Scope(paths, "me"), "notes/10ba682c8ad13513/settings"
    window, seen = core.ReplayWindow(), set[bytes]()

    row: reference.BatchRow = ("notes", "notes/{id}", True, False, None, [], None)
    query = "collections=notes&params=" + quote(
        json.dumps({"notes": [{"id": f"n{n}"} for n in range(BATCH)]}, separators=(",", ":")), safe=""
    )
    limits = (BATCH, 0, ["_keyring", "_members"])
    planner = core.BatchPlanner([row], *limits)
    plan = planner.plan(query.encode(), "")
    bodies: list[bytes | str | None] = [stored] * BATCH

    def join_twin() -> bytes:
        return b",".join(reference.pull_body(stored, 1_700_000_000_000) for _ in bodies)

    def verify_twin() -> bool:
        text = reference.request_message("POST", "/push/notes/a", small, *request)
        return reference.verify(key, text, signature)

    calls: list[tuple[str, int, Call, Call]] = [
        (
            "canonicalize 1 KB",
            len(small),
            lambda: core.canonicalize(small),
            lambda: reference.canonicalize(small),
        ),
        (
            "canonicalize 512 KiB",
            len(large),
            lambda: core.canonicalize(large),
            lambda: reference.canonicalize(large),
        ),
        (
            "push 1 KB: decode, hash, store",
            len(small),
            lambda: push_and_store(small),
            lambda: push_and_store_twin(small),
        ),
        (
            "push 512 KiB: decode, hash, store",
            len(large),
            lambda: push_and_store(large),
            lambda: push_and_store_twin(large),
        ),
        (
            "the same of push-512k, many escapes",
            len(escaped),
            lambda: push_and_store(escaped),
            lambda: push_and_store_twin(escaped),
        ),
        (
            "pull 1 KB: locate, check, answer",
            len(stored),
            lambda: pull(stored),
            lambda: reference.pull_body(stored, 1_700_000_000_000),
        ),
        (
            "pull 512 KiB: locate, check, answer",
            len(stored_large),
            lambda: pull(stored_large),
            lambda: reference.pull_body(stored_large, 1_700_000_000_000),
        ),
        (
            "batch of 100: plan",
            len(query),
            lambda: planner.plan(query.encode(), "").reads,
            lambda: reference.batch_entries([row], limits, query, "", []),
        ),
        (
            "batch of 100 x 1 KB: check, join",
            BATCH * len(stored),
            lambda: plan.answer(bodies, 1_700_000_000_000).body(),
            join_twin,
        ),
        (
            "batch of 100 events: a Parquet file",
            len(events),
            lambda: encode_events(events),
            lambda: encode_events_twin(events),
        ),
        (
            "verify_request 1 KB",
            len(small),
            lambda: core.verify_request(parsed, signature, "POST", ["/push/notes/a"], small, *request),
            verify_twin,
        ),
        (
            f"verify_requests {SIGNED} x 1 KB",
            SIGNED * len(small),
            lambda: core.verify_requests(signed_requests),
            lambda: [verify_twin() for _ in signed_requests],
        ),
        (
            "Scope.allows",
            0,
            lambda: scope.allows(document_key),
            lambda: reference.scope_allows(paths, "me", document_key),
        ),
        (
            "ReplayWindow digest and add",
            0,
            lambda: window.add(core.ReplayWindow.digest(key, request[2])),
            lambda: seen.add(hashlib.sha256(f"{key}\0{request[2]}".encode()).digest()[:16]),
        ),
    ]
    return [Case(*each) for each in calls]


def measure(quick: bool) -> list[Row]:
    rows = []
    timed = partial(microseconds, rounds=1, round_s=0.0) if quick else microseconds
    for case in cases():
        rounds = timed(case.call)
        twin_us = statistics.median(timed(case.twin))
        spread = rounds[0], rounds[-1]
        rows.append(Row(case.name, statistics.median(rounds), spread, twin_us, case.body_bytes))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.core", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="each call twice: to see that it works")
    rows = measure(parser.parse_args().quick)
    print(f"{'':36} {'core us':>9} {'spread':>19} {'MB/s':>6} {'Python us':>10} {'times':>6}")
    for row in rows:
        low, high = row.core_spread_us
        rate = f"{row.megabytes_per_s:6.0f}" if row.body_bytes else " " * 6
        print(
            f"{row.name:36} {row.core_us:9.2f} {f'{low:.2f} to {high:.2f}':>19} {rate} "
            f"{row.twin_us:10.2f} {row.twin_us / row.core_us:6.1f}"
        )


if __name__ == "__main__":
    main()
