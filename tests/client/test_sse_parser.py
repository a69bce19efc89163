"""Server-sent events as they are read: whatever the line ends and the chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync.client.watch import MAX_EVENT_BYTES, ServerSentEvent, SSEParser

TEXT = (
    "\ufeff: opening\n\nid: 1\n\n: beat\n\nid: 2\nevent: reset\ndata: {}\n\n"
    "data:a\ndata: é\ndata\nretry: 1500\n\nid\nunknown: x\nno colon\ndata:  two\n\nid: 9\ndata: lost"
)
MEANT = [
    ServerSentEvent(None, "", "1"),
    ServerSentEvent("{}", "reset", "2"),
    ServerSentEvent("a\né\n", "", None),
    ServerSentEvent(" two", "", ""),
]


def read(*chunks: bytes) -> list[ServerSentEvent]:
    blocks = SSEParser()
    return list(itertools.chain.from_iterable(map(blocks.feed, chunks)))


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@given(cuts=st.lists(st.integers(0, 220)))
def test_blocks_are_the_same_however_lines_end_and_chunks_are_split(end: str, cuts: list[int]) -> None:
    whole = TEXT.replace("\n", end).encode()
    edges = sorted({0, *(min(split, len(whole)) for split in cuts), len(whole)})
    assert read(*(whole[a:b] for a, b in itertools.pairwise(edges))) == MEANT
    assert read(*(bytes([byte]) for byte in whole)) == MEANT


def test_event_is_dispatched_at_its_blank_line() -> None:
    blocks = SSEParser()
    assert blocks.feed(b"data: 1\r\r") == [ServerSentEvent("1", "", None)]
    assert blocks.feed(b"\ndata: 2\n") == []
    assert blocks.feed(b"") == []
    assert blocks.feed(b"\n") == [ServerSentEvent("2", "", None)]


@pytest.mark.parametrize(
    ("value", "retry_s"),
    [("0", 0.0), ("1500", 1.5), ("1e3", 0.0), ("-5", 0.0), ("", 0.0), ("٣", 0.0), ("9" * 5000, 0.0)],
)
def test_only_digits_say_when_to_connect_again(value: str, retry_s: float) -> None:
    blocks = SSEParser()
    blocks.feed(f"retry: {value}\n".encode())
    assert blocks.retry_s == retry_s


def test_an_id_with_a_null_character_is_none_and_bytes_that_are_no_text_are_replaced() -> None:
    assert read(b"id: a\0b\ndata: \xff\n\n") == [ServerSentEvent("\ufffd", "", None)]


@pytest.mark.parametrize("part", [b"x" * 10_000, b"data: " + b"x" * 10_000 + b"\n"])
def test_an_event_without_an_end_is_not_kept_for_ever(part: bytes) -> None:
    blocks = SSEParser()
    for _ in range(MAX_EVENT_BYTES // len(part)):
        assert blocks.feed(part) == []
    with pytest.raises(ValueError, match="too long"):
        blocks.feed(b"data: " + part * 2)


def test_comments_may_go_on_for_ever() -> None:
    blocks = SSEParser()
    for _ in range(MAX_EVENT_BYTES // 1000 + 2):
        assert blocks.feed(b":" + b" " * 1000 + b"\n") == []
    assert blocks.feed(b"data: 1\n\n") == [ServerSentEvent("1", "", None)]
