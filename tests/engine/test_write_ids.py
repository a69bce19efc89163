"""Marks that no reader of JSON sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync._core import decode_push, read_document
from pysync.write_ids import as_whitespace, has_write_id, new_write_id, strip_write_id, with_write_id


@given(st.binary(max_size=200))
def test_write_id_goes_on_and_off(body: bytes) -> None:
    write_id = new_write_id()
    stored = with_write_id(body, write_id)
    assert stored.startswith(body)
    assert stored[len(body) :].isspace()
    assert strip_write_id(stored) == body
    assert strip_write_id(with_write_id(stored, write_id)) == stored
    assert with_write_id(body, new_write_id()) != stored
    assert has_write_id(stored, write_id)
    assert not has_write_id(stored, new_write_id())


@pytest.mark.parametrize("body", [b"", b"{}", b"{}\n", b"\n" + b" " * 63, b"x\n" + b" " * 63 + b"\n"])
def test_document_without_a_write_id_is_taken_as_it_is(body: bytes) -> None:
    assert strip_write_id(body) == body


@pytest.mark.parametrize("data", [b'{"n":1}', b'{"n":9007199254740993}'])
def test_document_with_a_write_id_reads_as_before(data: bytes) -> None:
    push, write_id = decode_push(b'{"data":%b}' % data), new_write_id()
    plain, read = read_document(push.stored(7)), read_document(push.stored(7, as_whitespace(write_id)))
    assert has_write_id(push.stored(7, as_whitespace(write_id)), write_id)
    assert (read.data, read.hash, read.ts_ms) == (plain.data, plain.hash, 7)
    assert read.answer(9) == plain.answer(9)
