"""Sorted runs of entries, and how they are merged."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from pysync._core import split_key
from pysync.backup.encoding import Row, decode_rows, decompress_text, is_sha256

FAN_OUT: Final = 16
"""Number of runs of one size that are merged."""


@dataclass(frozen=True, slots=True)
class SortedRun:
    """A sorted list of entries. `first` and `last` are the keys of its first and last one."""

    pages: list[str]
    entries: int
    first: str
    last: str

    def is_sound(self) -> bool:
        """Return True if every member has its type."""
        facts = (type(self.pages), type(self.entries), type(self.first), type(self.last))
        return facts == (list, int, str, str) and self.entries > 0 and all(map(is_sha256, self.pages))

    @property
    def level(self) -> int:
        """The size of the run, in powers of `FAN_OUT`."""
        return (self.entries.bit_length() - 1) // (FAN_OUT.bit_length() - 1)


class _RunReader:
    """Reads the rows of a run, a page at a time."""

    def __init__(self, run: SortedRun, pages: dict[str, bytes]) -> None:
        self._names = iter(run.pages)
        self._pages = pages
        self._rows: list[Row] = []
        self._orders: list[tuple[str, str]] = []
        self._at = 0

    def load(self) -> bool:
        """Read the next page if no row is left. Returns False at the end."""
        while self._at == len(self._rows):
            name = next(self._names, None)
            if name is None:
                return False
            self._rows = decode_rows(decompress_text(self._pages[name]))
            self._orders = [split_key(row[0]) for row in self._rows]
            self._at = 0
        return True

    @property
    def last(self) -> tuple[str, str]:
        """What the last row of the page is sorted by."""
        return self._orders[-1]

    def take(self, last: tuple[str, str]) -> Iterator[tuple[tuple[str, str], Row]]:
        """Return the rows up to this one, with what they are sorted by."""
        start, self._at = self._at, bisect_right(self._orders, last, self._at)
        return zip(self._orders[start : self._at], self._rows[start : self._at], strict=True)


def merged(runs: Sequence[SortedRun], pages: dict[str, bytes], *, keeps_removed: bool) -> Iterator[Row]:
    """Yield the newest row of each key, sorted. `pages` has the texts of the pages, compressed and
    known to be valid."""
    readers = [_RunReader(run, pages) for run in runs]
    while readers := [reader for reader in readers if reader.load()]:
        last = min(reader.last for reader in readers)
        newest: dict[tuple[str, str], Row] = {}
        for reader in readers:
            newest.update(reader.take(last))
        rows = map(newest.__getitem__, sorted(newest))
        yield from rows if keeps_removed else (row for row in rows if len(row) > 1)


def runs_to_merge(runs: Sequence[SortedRun]) -> int:
    """Return the number of runs at the end of the list that should be merged; 0 for none."""
    if len(runs) > 1 and sum(run.entries for run in runs[1:]) >= runs[0].entries:
        return len(runs)
    levels = [run.level for run in reversed(runs)]
    for limit in sorted(set(levels)):
        small = [*takewhile(limit.__ge__, levels)]
        if small.count(limit) >= FAN_OUT or len(small) >= 2 * FAN_OUT:
            return len(small)
    return 0
