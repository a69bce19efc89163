"""Append-only logs in the core: whatever is appended, sealed and stored, they keep to the twin."""

import itertools
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import reference_append_log as twin
from support.core_append_log import DATA, NOW_MS, PROOFS, Kept
from support.core_outcome import outcome
from support.depth import depth
from support.json_texts import json_texts, objects, scalar_texts, string_texts

import pysync._core as core
from pysync.errors import BodyNotObject, BodyTooDeep, DocumentCorrupt, InvalidData, InvalidJson, InvalidTs

# Many elements are made of few choices, so that logs of thousands of them are drawn quickly.

STEPS_MS = [None, None, None, 0, 1, 17, -3, 300_000, 300_001]


@dataclass(frozen=True)
class Appended:
    """An append of elements that `seed` tells."""

    count: int
    seed: int
    later_ms: int
    room: int | None

    def elements(self, now_ms: int, last_ms: int) -> list[twin.Element]:
        made = []
        for n in range(self.seed, self.seed + self.count * 7919, 7919):
            step = STEPS_MS[n % len(STEPS_MS)]
            base = last_ms + (n % 5) if n % 2 else now_ms
            ts_ms = None if step is None else max(0, base + step)
            made.append(twin.Element(ts_ms, DATA[n // 9 % len(DATA)], PROOFS[n // 72 % len(PROOFS)]))
        return made


appends = st.builds(
    Appended,
    st.integers(0, 12) | st.integers(0, 300),
    st.integers(0, 10**6),
    st.sampled_from([0, 0, 1, 50, 400_000, -10_000]),
    st.none() | st.none() | st.integers(0, 100),
)
seals = st.sampled_from([1, 150, 1000, 100_000])
steps = st.lists(appends | appends | seals | seals | st.just("reread"), max_size=25)
counts = st.none() | st.integers(0, 30) | st.integers(0, 5000)


@settings(max_examples=depth(20, 160), deadline=None)
@given(steps, st.data())
def test_a_log_is_the_twin_whatever_is_appended_sealed_and_read_back(steps: list[Any], data: Any) -> None:
    kept, log, now_ms = Kept(), twin.Log(), NOW_MS
    outcomes_by_id: dict[str, twin.Outcome] = {}
    numbers = itertools.count()
    for step in steps:
        if step == "reread":
            kept.reread()
        elif isinstance(step, int):
            kept.seal(step)
        else:
            now_ms += step.later_ms
            wanted = step.elements(now_ms, log.ts_ms)
            write_ids = [f"{next(numbers):x}" if n % 3 == 0 else "" for n in range(len(wanted))]
            max_count = None if step.room is None else log.count + step.room
            log, expected = log.append(wanted, now_ms, max_count)
            assert kept.append(wanted, now_ms, max_count, write_ids) == expected
            outcomes_by_id |= {
                write_id: outcome for write_id, outcome in zip(write_ids, expected, strict=True) if write_id
            }
        assert (kept.head.count, kept.head.hash) == (log.count, log.hash)
    times = [element["ts"] for element in log.within()] or [NOW_MS]
    assert kept.read(None, None, None) == log.within()
    for _ in range(6):
        since = data.draw(
            st.none() | st.sampled_from(times) | st.integers(max(0, times[0] - 2), times[-1] + 2)
        )
        newest, oldest = data.draw(st.tuples(counts, st.none()) | st.tuples(st.none(), counts))
        assert kept.read(since, newest, oldest) == log.within(since, newest, oldest)
    everything = kept.segments(None, None, None)
    for write_id in data.draw(st.lists(st.sampled_from([*outcomes_by_id, "ffffff"]), max_size=5)):
        outcome = outcomes_by_id.get(write_id)
        assert kept.head.written(write_id, everything) == (outcome if isinstance(outcome, tuple) else None)


def filled(count: int, max_bytes: int = 400, id: str = "0a1b", each: int = 7) -> tuple[Kept, twin.Log]:
    """A log of `count` elements, one millisecond apart, sealed after every `each`."""
    kept, log = Kept(core.LogHead(id)), twin.Log()
    for start in range(0, count, each):
        wanted = [
            twin.Element(NOW_MS + n, {"n": n, "id": id}, PROOFS[n % 2])
            for n in range(start, min(count, start + each))
        ]
        if kept.head.tail_count:
            kept.seal(max_bytes)
        log, _ = log.append(wanted, NOW_MS + count, None)
        kept.append(wanted, NOW_MS + count, None, [f"{n.ts_ms:x}" for n in wanted])
    return kept, log


@cache
def long_log() -> tuple[Kept, twin.Log]:
    return filled(20_000, max_bytes=10_000)


def read_and_needed(*bounds: int | None) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The segments of a long log that are read for bounds, and those that hold elements within them, as
    positions: of the first, after the last."""
    kept, twin_log = long_log()
    positions = [element["ts"] - NOW_MS for element in twin_log.within(*bounds)]
    read, spans = (
        [(node.start, node.end) for node, _ in kept.segments(*each)] for each in (bounds, (None, None, None))
    )
    return read, [
        (start, end) for start, end in spans if positions and start <= positions[-1] and positions[0] < end
    ]


@pytest.mark.slow
@settings(max_examples=depth(20, 200), deadline=None)
@given(
    st.none() | st.integers(NOW_MS - 2, NOW_MS + 20_001) | st.integers(NOW_MS + 19_900, NOW_MS + 20_001),
    st.none() | st.integers(0, 3000),
)
def test_a_tail_is_read_from_the_segments_that_hold_it(since: int | None, newest: int | None) -> None:
    read, needed = read_and_needed(since, newest, None)
    assert read == needed


@pytest.mark.slow
@settings(max_examples=depth(20, 200), deadline=None)
@given(st.integers(NOW_MS - 2, NOW_MS + 20_001), st.integers(0, 3000))
def test_the_oldest_are_read_from_the_segments_that_hold_them_and_few_more(since: int, oldest: int) -> None:
    read, needed = read_and_needed(since, None, oldest)
    assert read[: len(needed)] == needed


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, 20_000])
def test_a_head_is_small_at_any_length(count: int) -> None:
    kept, _ = filled(count)
    kept.seal(400)
    assert len(kept.head.stored()) < 4000
    assert max(map(len, kept.objects.values())) < 1500


def test_the_first_seal_of_a_long_log_leaves_a_small_head() -> None:
    kept = Kept()
    elements = [twin.Element(None, {"n": n}) for n in range(5000)]
    kept.append(elements, NOW_MS, None, [""] * len(elements))
    kept.seal(1)
    assert len(kept.head.stored()) < 2000
    assert [each["data"]["n"] for each in kept.read(None, 20, None)] == list(range(4980, 5000))


def test_a_segment_holds_what_it_may_and_at_least_one_element() -> None:
    kept, _ = filled(100, max_bytes=1, each=100)
    kept.seal(1)
    assert [(n.start, n.end) for n, _ in kept.segments(None, None, None)] == [(n, n + 1) for n in range(100)]


def test_objects_of_another_key_or_log_are_corrupt() -> None:
    kept, other = filled(400)[0], filled(400, id="ffff")[0]
    segments, strange = kept.segments(None, None, None), other.segments(None, None, None)
    first, second = segments[:2]
    for wrong in ((first[0], second[1]), (first[0], strange[0][1]), (first[0], kept.head.stored())):
        with pytest.raises(DocumentCorrupt):
            kept.head.slice([wrong], False, None, None, None)
    blocks = [node for node in kept.head.nodes(None, None, None) if node.level]
    block, another = blocks[:2]
    for body in (kept.objects[another.name], other.objects[block.name], first[1]):
        with pytest.raises(DocumentCorrupt):
            kept.head.expand(body, block, None, None, None)
    with pytest.raises(DocumentCorrupt):
        kept.head.slice([(block, kept.objects[block.name])], False, None, None, None)


# Damage: an object is what was stored, or it is corrupt.

DAMAGED, _ = filled(124, each=4)
HEAD = DAMAGED.head.stored()
BLOCK = next(node for node in DAMAGED.head.nodes(None, None, None) if node.level)
SEGMENT = DAMAGED.segments(None, None, None)[0]


def read_head(stored: bytes) -> object:
    return core.LogHead.read(stored, "items").stored()


def read_block(stored: bytes) -> object:
    nodes = DAMAGED.head.expand(stored, BLOCK, None, None, None)
    return [(node.name, node.level, node.start, node.end, node.ts_ms) for node in nodes]


def read_segment(stored: bytes) -> object:
    segments = [(SEGMENT[0], stored)]
    write_id = f"{NOW_MS:x}"
    return DAMAGED.head.slice(segments, False, None, None, None), DAMAGED.head.written(write_id, segments)


OBJECTS = [(read_head, HEAD), (read_block, DAMAGED.objects[BLOCK.name]), (read_segment, SEGMENT[1])]


@pytest.mark.parametrize(("read", "stored"), OBJECTS, ids=["head", "block", "segment"])
def test_a_truncated_or_extended_object_is_corrupt(read: Any, stored: bytes) -> None:
    assert outcome(read, stored) is not DocumentCorrupt
    broken = [stored[:length] for length in range(len(stored))]
    for text in (*broken, stored + b"}", stored + b"\0", stored + b"\n", stored + stored):
        assert outcome(read, text) is DocumentCorrupt, text


@pytest.mark.parametrize(("read", "stored"), OBJECTS, ids=["head", "block", "segment"])
def test_an_object_with_a_flipped_bit_is_corrupt_or_the_same(read: Any, stored: bytes) -> None:
    whole = outcome(read, stored)
    for at in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[at] ^= 1 << bit
            assert outcome(read, bytes(damaged)) in (DocumentCorrupt, whole), damaged


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"x", b'{"v":1}', b'{"v":1,"ts":5,"hash":""}', b'{"data":[]}',
     b'{"data":{"items":{}}}', b'{"data":{"items":[1]}}', b'{"data":{"items":[{"data":{}}]}}',
     b'{"data":{"items":[{"ts":1}]}}', b'{"data":{"items":[{"ts":"1","data":{}}]}}',
     b'{"data":{"items":[{"ts":2,"data":{}},{"ts":2,"data":{}}]}}',
     b'{"data":{"items":[{"ts":1,"data":{"a":NaN}}]}}', b'{"data":{"items":[{"ts":1,"data":{"a":"\xff"}}]}}',
     b'{"data":{"items":[]}} x', b'{"v":1,"log":"0a","from":0,"to":0,"items":[]}', b'{"seg":true,"n":1}']
)  # fmt: skip
def test_malformed_log_is_corrupt(text: bytes) -> None:
    with pytest.raises(DocumentCorrupt):
        core.LogHead.read(text, "items")


# Append bodies.

ts_texts = st.one_of(
    st.sampled_from(
        ["null", "true", '"1"', "[]", "{}", "1.0", "-0", "-0.0", "1e3", "0.5", "-1", "1e400", "1e19", "1e20"]
    ),
    st.sampled_from([str(2**n + step) for n in (53, 63, 64) for step in (-1, 0, 1)]),
    st.integers(0, 2**64).map(str),
    json_texts,
)


@st.composite
def bodies(draw: st.DrawFn) -> str:
    members = [("data", draw(objects(json_texts)))]
    members += [("ts", draw(ts_texts)) for _ in range(draw(st.integers(0, 2)))]
    for name in twin.AUTHOR:
        member = string_texts() | string_texts() | scalar_texts
        members += [(name, draw(member)) for _ in range(draw(st.integers(0, 2)))]
    members += [
        (name, draw(json_texts)) for name in draw(st.sets(st.sampled_from(["baseHash", "data", "x"])))
    ]
    return "{" + ",".join(f'"{name}":{text}' for name, text in draw(st.permutations(members))) + "}"


def append_parts(body: bytes) -> tuple[bytes, bytes, int | None, str | None, str | None]:
    append = core.decode_append(body)
    return append.data, append.canonical, append.ts_ms, append.author_pubkey, append.author_signature


@pytest.mark.slow
@settings(max_examples=depth(75, 1200), deadline=None)
@given(bodies() | scalar_texts)
@example('{"data":{"__proto__":{"a":1},"q":[{"__proto__":1}],"a":{"constructor":1,"b":2}}}')
@example('{"data":{"a":9007199254740993}}')
def test_an_append_body_decodes_as_the_twin_decodes_it(body: str) -> None:
    assert outcome(append_parts, body.encode()) == outcome(twin.decode_append, body.encode())


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        (b"", InvalidJson),
        (b'{"data":{},"ts":NaN}', InvalidJson),
        (b'{"data":{},"ts":-1} {}', InvalidJson),
        (b'{"data":' + b'{"a":' * 64 + b"1" + b"}" * 65, BodyTooDeep),
        (b"[]", BodyNotObject),
        (b'{"ts":-1}', InvalidData),
        (b'{"data":[],"ts":"1"}', InvalidData),
        (b'{"data":{},"ts":-1}', InvalidTs),
        (b'{"data":{},"ts":1.5}', InvalidTs),
        (b'{"data":{},"ts":true}', InvalidTs),
        (b'{"data":{},"ts":"1"}', InvalidTs),
    ],
)
def test_a_bad_append_body_is_rejected_for_its_first_fault(body: bytes, error_type: type[Exception]) -> None:
    with pytest.raises(error_type):
        core.decode_append(body)


@pytest.mark.parametrize("author", [{}, {"authorPubkey": "p"}, {"authorSignature": "s", "authorPubkey": 1}])
def test_half_a_proof_is_none(author: dict[str, Any]) -> None:
    append = core.decode_append(json.dumps({"data": {}, "baseHash": 7, **author}).encode())
    assert (append.author_pubkey, append.author_signature) == (None, None)


def test_one_rejected_element_leaves_its_neighbours_alone() -> None:
    kept = Kept()
    wanted = [twin.Element(ts_ms, {"n": ts_ms}) for ts_ms in (5, 5, NOW_MS + 300_001, 6, 4, NOW_MS + 300_000)]
    outcomes = kept.append([*wanted, twin.Element(None, {})], NOW_MS, 4, [""] * 7)
    assert [outcome if isinstance(outcome, str) else outcome[1] for outcome in outcomes] == [
        5, "non_monotonic_timestamp", "ts_too_far_ahead", 6, "non_monotonic_timestamp",
        NOW_MS + 300_000, NOW_MS + 300_001,
    ]  # fmt: skip
    assert kept.append([twin.Element(None, {})], NOW_MS, 4, [""]) == ["append_limit_exceeded"]


def test_the_time_after_the_last_possible_one_is_not_before_it() -> None:
    last = 2**64 - 1
    log = twin.Log((twin.Element(last, {}),))
    head = core.LogHead.read(json.dumps(twin.starfish_document(log)).encode(), "items")
    after, [outcome] = head.append([(core.decode_append(b'{"data":{}}'), "")], NOW_MS, None)
    assert isinstance(outcome, str)
    assert after.count == 1
