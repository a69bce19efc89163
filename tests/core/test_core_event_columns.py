"""Batches of events as Parquet files (docs/reference/protocol.md#events)."""

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import reference
from support.depth import depth
from support.json_texts import json_texts, keys, objects, string_texts

import pysync._core as core
from pysync.errors import InvalidEvents, PysyncError
from pysync.parquet.event_merger import SCHEMA

RECEIVED_AT = "2026-01-02T03:04:05.678Z"

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


def table(data: bytes) -> pa.Table:
    """What pyarrow reads from the file of a batch."""
    file = core.encode_events(data, RECEIVED_AT)
    return pq.read_table(pa.BufferReader(file))


def columns(data: bytes) -> list[list[str]]:
    """The texts of the columns that events fill."""
    return [column.to_pylist() for column in table(data).drop_columns("received_at").columns]


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
def test_malformed_batch_is_rejected(data: str) -> None:
    with pytest.raises(InvalidEvents):
        core.encode_events(data.encode(), RECEIVED_AT)


def test_the_file_has_the_columns_of_all_files() -> None:
    read = table(b'{"events":[{},{"received_at":"then"}]}')
    assert read.schema.equals(SCHEMA)
    assert read["received_at"].to_pylist() == [RECEIVED_AT] * 2


def test_long_columns_have_many_pages_that_pyarrow_and_duckdb_read(tmp_path: Path) -> None:
    events = [{"event": str(n), "context": "x" * (n % 7 * 200_000)} for n in range(40)]
    path = tmp_path / "events.parquet"
    path.write_bytes(core.encode_events(json.dumps({"events": events}).encode(), RECEIVED_AT))
    wanted = [(event["event"], event["context"], RECEIVED_AT, "") for event in events]
    names = ["event", "context", "received_at", "extra"]
    read = pq.read_table(path, columns=names)
    assert list(zip(*(column.to_pylist() for column in read.columns), strict=True)) == wanted
    with duckdb.connect() as engine:
        assert engine.execute(f"SELECT {', '.join(names)} FROM '{path}'").fetchall() == wanted
        pages = engine.execute(f"SELECT DISTINCT type, num_values FROM parquet_metadata('{path}')").fetchall()
    assert pages == [("BYTE_ARRAY", 40)]


def test_a_batch_has_the_same_file_each_time() -> None:
    data = b'{"events":[{"event":"a","z":1}]}'
    assert core.encode_events(data, RECEIVED_AT) == core.encode_events(data, RECEIVED_AT)
