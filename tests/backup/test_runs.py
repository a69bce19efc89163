"""Runs of entries are merged: the newest one of each key stays."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pysync._core import split_key
from pysync.backup.encoding import Row, compress, encode_page
from pysync.backup.runs import SortedRun, merged

KEYS = st.sampled_from(["a", "b", "a/b", "a/b/c", "a-b", "b/a", "é", "a/é"])
RUNS = st.lists(st.dictionaries(KEYS, st.booleans(), min_size=1), min_size=1, max_size=6)


def row(key: str, n: int, is_removed: bool) -> Row:
    """The row that run `n` has of a key."""
    return (
        [key] if is_removed else [key, f"etag{n}", "text/plain", n, 3, "00", False, [[f"pack{n}", n, 3, ""]]]
    )


@given(RUNS, st.integers(1, 3), st.booleans())
def test_a_merge_has_the_newest_row_of_each_key(
    contents: list[dict[str, bool]], page_size: int, keeps_removed: bool
) -> None:
    runs: list[SortedRun] = []
    pages: dict[str, bytes] = {}
    newest: dict[str, Row] = {}
    for n, content in enumerate(contents):
        keys = sorted(content, key=split_key)
        names = []
        for at in range(0, len(keys), page_size):
            some = keys[at : at + page_size]
            names.append(f"{n}-{at}")
            pages[names[-1]] = compress(encode_page([row(key, n, content[key]) for key in some]))
        runs.append(SortedRun(names, len(keys), keys[0], keys[-1]))
        newest |= {key: row(key, n, content[key]) for key in keys}
    expected: list[Any] = [newest[key] for key in sorted(newest, key=split_key)]
    if not keeps_removed:
        expected = [one for one in expected if len(one) > 1]
    assert [*merged(runs, pages, keeps_removed=keeps_removed)] == expected
