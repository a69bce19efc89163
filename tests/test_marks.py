"""Marks that no reader of JSON sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync._core import decode_push, read_document
from pysync.write_ids import bears, blank, marked, new_mark, unmarked


@given(st.binary(max_size=200))
def test_a_mark_goes_on_and_off(body: bytes) -> None:
    mark = new_mark()
    stored = marked(body, mark)
    assert stored.startswith(body)
    assert stored[len(body) :].isspace()
    assert unmarked(stored) == body
    assert unmarked(marked(stored, mark)) == stored
    assert marked(body, new_mark()) != stored
    assert bears(stored, mark)
    assert not bears(stored, new_mark())


@pytest.mark.parametrize("body", [b"", b"{}", b"{}\n", b"\n" + b" " * 63, b"x\n" + b" " * 63 + b"\n"])
def test_what_others_wrote_is_taken_as_it_is(body: bytes) -> None:
    assert unmarked(body) == body


@pytest.mark.parametrize("data", [b'{"n":1}', b'{"n":9007199254740993}'])
def test_a_marked_document_reads_as_before(data: bytes) -> None:
    push, mark = decode_push(b'{"data":%b}' % data), new_mark()
    plain, read = read_document(push.stored(7)), read_document(push.stored(7, blank(mark)))
    assert bears(push.stored(7, blank(mark)), mark)
    assert (read.data, read.hash, read.ts_ms) == (plain.data, plain.hash, 7)
    assert read.answer(9) == plain.answer(9)
