"""Batches of events as columns (docs/reference/protocol.md#events)."""

import json
import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import reference
from support.depth import depth
from support.json_texts import json_texts, keys, objects, string_texts

import pysync._core as core
from pysync.errors import InvalidEvents, PysyncError

names = st.one_of(
    st.sampled_from([json.dumps(name) for name in (*reference.EVENT_COLUMNS, "received_at")]),
    keys,
    string_texts(),
)
events = st.lists(st.tuples(names, json_texts), max_size=6).map(
    lambda members: "{" + ",".join(f"{name}:{value}" for name, value in members) + "}"
)
batches = st.lists(events, min_size=1, max_size=5).map(lambda batch: f"[{','.join(batch)}]")
bodies = st.one_of(batches, json_texts, objects(json_texts)).map(
    lambda text: f'{{"data":{{"events":{text},"zeal":[{{"events":[]}}]}}}}'.encode()
)


def columns(data: bytes) -> list[list[str]]:
    """The texts that the core's columns stand for."""
    batch = core.EventColumns(data)
    return [texts(len(batch), *batch.column(at)) for at in range(10)]


def texts(count: int, offsets: bytes, text: bytes) -> list[str]:
    ends = struct.unpack(f"<{count + 1}i", offsets)
    assert ends[0] == 0
    assert ends[-1] == len(text)
    return [text[start:end].decode() for start, end in pairwise(ends)]


def outcome(make: Any, data: bytes) -> Any:
    try:
        return make(data)
    except PysyncError as error:
        return type(error)


@pytest.mark.slow
@settings(max_examples=depth(50, 800))
@given(bodies)
@example(
    b'{"data":{"events":[{"ev\\u0065nt":"\\u0000\\ud83d\\ude00","__proto__":1,"b":2,"a":{"d":1,"c":2}}]}}'
)
@example(b'{"data":{"events":[{"event":"","ts":18446744073709551615,"dt":1e400}]}}')
def test_columns_hold_what_their_twin_makes_of_a_batch(body: bytes) -> None:
    try:
        data = core.decode_push(body).data
    except PysyncError:
        return
    assert outcome(columns, data) == outcome(reference.event_columns, data)


@pytest.mark.parametrize(
    "data",
    ['{}', '{"events":null}', '{"events":[]}', '{"events":{}}', '{"events":"[{}]"}', '{"events":[{},1]}',
     '{"events":[null]}', '{"events":[[]]}', '{"event":[{}]}'],
)  # fmt: skip
def test_what_is_no_batch_is_refused(data: str) -> None:
    with pytest.raises(InvalidEvents):
        core.EventColumns(data.encode())


def test_there_are_ten_columns() -> None:
    with pytest.raises(IndexError):
        core.EventColumns(b'{"events":[{}]}').column(10)
