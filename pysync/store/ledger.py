"""Usage: what is stored for whom, and the limits of it.

A write counts for an `Account`, which names up to five subjects. A store keeps what each subject uses, and
rejects a write with which a subject would use more than its limit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol, get_args

from pysync.model import Usage

SubjectKind = Literal["namespace", "collection", "identity", "space", "issuer"]
KINDS: Final[tuple[SubjectKind, ...]] = get_args(SubjectKind)


class Subject(NamedTuple):
    """One that data counts for. The root namespace has the name `""`, a collection `namespace/name`."""

    kind: str
    name: str


class Account(NamedTuple):
    """Those that a write counts for, in the order of `KINDS`; None for none of that kind."""

    namespace: str
    collection: str
    identity: str | None = None
    space: str | None = None
    issuer: str | None = None

    def subjects(self) -> Iterator[Subject]:
        """Yield the subjects of this account."""
        for kind, name in zip(KINDS, self, strict=True):
            if name is not None:
                yield Subject(kind, name)


NOTHING: Final = Usage()


class Charge(NamedTuple):
    """The amounts that a write counts as, and for whom. If `account` is None, it is that of `key`, and `key`
    is by default what is written. `elements` is the number of elements of a log whose head is written, 0 for
    other objects that are neither a document nor a file, and else None. A write that is not `checked` is one
    of the server itself. No quota rejects it, and it counts for the account of what it replaces, if that is
    counted."""

    account: Account | None = None
    elements: int | None = None
    key: str = ""
    checked: bool = True


ChargeOf = Callable[[str], Charge]
"""Returns what an object counts as of which only the key is known, and which is not checked. Keys of the
server's own have no account."""


class Ledger(Protocol):
    """The usage of the subjects of a store. Raises the errors of the store."""

    async def used(self, subjects: Iterable[Subject]) -> dict[Subject, Usage]:
        """Return what each of these subjects uses."""

    async def largest(self, kind: SubjectKind, limit: int) -> list[tuple[str, Usage]]:
        """Return the names of the subjects of this kind that use the most bytes, at most `limit`, and what
        each uses. The largest comes first."""

    async def is_complete(self) -> bool:
        """Return True if everything stored is counted. False after quotas are switched on, until the data
        that was there before is counted."""


class UncountedRow(NamedTuple):
    """A stored object that is not counted, by the number of its row. `size` is in bytes."""

    id: int
    key: str
    etag: str
    size: int
    is_file: bool


class CountedRow(NamedTuple):
    """A row that has been counted, and its charge, if it still has this etag. A file has no elements."""

    row: UncountedRow
    charge: Charge


class CountableLedger(Ledger, Protocol):
    """A ledger that is exact: what it counts changes with each object, and never otherwise."""

    async def begin_count(self) -> None:
        """Note that all objects that are not counted are about to be."""

    async def end_count(self) -> None:
        """Note that all objects were counted. They are not if another process has written meanwhile without
        counting."""

    def uncounted(self, after: int) -> tuple[list[UncountedRow], int | None]:
        """Return some of the objects that are not counted, in rows after this number, and the number to
        continue after; None at the end."""

    async def count(self, rows: Sequence[CountedRow]) -> None:
        """Count these objects, except those that have changed."""

    async def prune(self) -> None:
        """Forget the subjects that use nothing."""
