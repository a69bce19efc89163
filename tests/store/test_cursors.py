"""Cursors as texts: ids of the change log, and places within a run of pages of the feed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync.changelog import Cursor, change_id
from pysync.feed import FeedPage, LatestChange

ids = st.builds(change_id, st.integers(0, 10**17 - 1), st.from_regex("[0-9a-f]{8}", fullmatch=True))


@given(st.tuples(st.integers(0, 10**17 - 1), ids, ids))
def test_a_cursor_within_a_run_is_read_as_it_was_written(parts: tuple[int, str, str]) -> None:
    cursor = Cursor(f"{parts[0]:017d}", *parts[1:])
    assert Cursor.parse(str(cursor)) == cursor
    page = FeedPage([], 0, False, "", str(cursor)[17:])
    assert page.cursor_after(LatestChange(cursor.position, "a", None, None)) == str(cursor)


@pytest.mark.parametrize(
    "id_",
    [
        change_id(101, "0a1b2c3d"),
        change_id(101, ""),
        "00000000000000101",
        "001764340000000.001764340000000-0000000001",
    ],
)
def test_an_id_of_any_log_is_a_cursor(id_: str) -> None:
    cursor = Cursor.parse(id_)
    assert cursor == (id_, id_, id_)
    assert str(cursor) == id_


@given(st.integers(0, 10**17 - 1), st.integers(0, 10**17 - 1))
def test_ids_of_one_epoch_compare_as_their_numbers(one: int, other: int) -> None:
    assert (change_id(one, "0a1b2c3d") < change_id(other, "0a1b2c3d")) == (one < other)


ID = change_id(5, "0a1b2c3d")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "101",
        "0" * 18,
        ID + "\n",
        ID.upper(),
        ID[:-1],
        ID + "0",
        "\u0663" * 17,
        f"{ID}~{ID}",
        f"{ID}~{ID}~{ID}",
        f"{ID[:17]}~{ID}",
        f"{ID[:17]}~{ID}~",
        f"{ID[:17]}~{ID}~{ID}~{ID}",
        "001764340000000.001764340000000-1",
    ],
)
def test_a_text_that_no_log_issues_is_not_a_cursor(text: str) -> None:
    with pytest.raises(ValueError, match="not a cursor"):
        Cursor.parse(text)
