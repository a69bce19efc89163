"""The history of a run, requests and responses: a file with one JSON object a line."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import orjson

Kind = Literal[
    "setup",
    "pull",
    "push",
    "create",
    "delete",
    "append",
    "tail",
    "upload",
    "download",
    "batch",
    "list",
    "rows",
    "replay",
    "metered",
    "changes",
    "follow",
    "event",
    "reset",
    "kill",
    "stall",
    "loss",
    "faults",
]
"""`pull` and `push` are of a document, `create` and `delete` of a draft, `append` and `tail` of a log,
`upload` and `download` of a file; `batch` pushes events, `list` names their files, `rows` pulls one. `replay`
sends the bytes of an earlier request again; `metered` pulls where there is a rate limit. `changes` is a page
of the latest changes. `follow` is a stream of changes, from its request to its last byte; `event` is a change
that it told, `reset` that it could not tell all. `setup` is the first line, `faults` the last. `kill` is the
death of a node, from its last moment to when it served again, `stall` a time in which Redis stood still,
`loss` the moment in which it lost its memory."""

END: Final = "end"
"""Who reads what is there when all others have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One request, and what became of it. Times are seconds of one monotonic clock: `start` is before its
    first byte was sent, `end` after the last of its answer was read.

    `status` is None where no answer came: nobody knows whether it was done, as after a 5xx and after a 409
    `outcome_unknown`. `nonce` is the signed request's own: requests that are equal byte for byte share it.

    sent, by kind:
        push      data, base; once: its Idempotency-Key, where it has one
        create    data, which holds an `id` of its own; once: its Idempotency-Key
        delete    base: the hash of what is there; once, likewise
        pull      known: the hash in its If-None-Match, where it has one
        append    data, which holds an `id` of its own; once, likewise
        tail      the query: last, checkpoint or full
        upload    sha256, size of the bytes
        download  known, as of a pull; the answer: hash is the ETag, sha256 that of the bytes
        batch     ids of its events; once, likewise
        list      after: the name from which it goes on
        rows      the answer: as that of a download, and the ids in the file
        replay    kind: of the request that is sent again
        changes   since: the cursor of its query, where it has one, or `now`; the answer is the whole page
        follow    after: the id from which it goes on, where it has one; opened: when it began to tell
        event     id; its change is the answer
        reset     id: from which the stream goes on
        metered   from_ms, to_ms: the wall clock at start and end
        setup     seed; remembers: whether changes are told from the oldest on; is_ordered: whether who lists
                  batches misses none; limit: window_ms and max_requests of what is metered
        faults    how often the way to the store failed, by fault
    """

    kind: Kind
    who: str
    node: int
    key: str = ""
    sent: dict[str, Any] = field(default_factory=dict)
    start: float
    end: float
    status: int | None = None
    answer: Any = None
    nonce: str = ""
    error: str = ""
    line: int = field(default=0, compare=False)
    """Where it stands in its history, counted from 1."""

    @property
    def is_unknown(self) -> bool:
        if self.status == 409:
            return bool(self.answer.get("code") == "outcome_unknown")
        return self.status is None or self.status >= 500


class History:
    """A history that is being written. Operations are written as they end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")

    def add(self, operation: Operation) -> None:
        self._file.write(encode(operation))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def encode(operation: Operation) -> bytes:
    """The line of an operation, without what it does not have."""
    members = {name: value for name in _NAMES if (value := getattr(operation, name)) not in (None, "", {})}
    return orjson.dumps(members, option=orjson.OPT_APPEND_NEWLINE)


def read(path: Path) -> list[Operation]:
    """The operations of a history, in the order of its lines."""
    with path.open("rb") as lines:
        return [Operation(**orjson.loads(text), line=line) for line, text in enumerate(lines, start=1)]


def numbered(operations: Iterable[Operation]) -> list[Operation]:
    """The operations, as `read` gives them."""
    return [replace(operation, line=line) for line, operation in enumerate(operations, start=1)]


_NAMES: Final = [own.name for own in fields(Operation) if own.name != "line"]
