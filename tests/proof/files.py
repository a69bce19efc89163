"""Judges the history of one file: the last write wins, and each has bytes that no other has.

A pull tells by its bytes which write it saw. All that tells of one write, itself included, was served while
that was the last; so between the first of it that ended and the last that began no other bytes were there.
"""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from proof.history import END, Operation
from proof.verdict import Violation
from proof.writes import Write, writes


def content(name: str, size: int) -> bytes:
    """The bytes of the file `name`, at least as many as that has, which no other name's begin with."""
    line = f"{name}\n".encode()
    return (line * (size // len(line) + 1))[: max(size, len(line))]


def sha256_of(name: str, size: int) -> str:
    return hashlib.sha256(content(name, size)).hexdigest()


def uploads_of(operations: Iterable[Operation]) -> list[Write]:
    """The files that were pushed; no two have the same bytes."""
    requests = [operation for operation in operations if operation.kind == "upload"]
    return writes(requests, lambda upload: str(upload.sent["sha256"]))


def judge_file(key: str, operations: Iterable[Operation]) -> Iterator[Violation]:
    """What the operations on the file at `key` show to be broken."""
    operations = list(operations)
    uploads = {str(upload.first.sent["sha256"]): upload for upload in uploads_of(operations)}
    downloads = [operation for operation in operations if operation.kind == "download"]
    for upload in uploads.values():
        for answered in upload.acknowledged:
            if answered.answer["hash"] != answered.sent["sha256"]:
                yield Violation("true hashes", "a file was answered another hash", (answered,))
    if not any(download.who == END and download.status == 200 for download in downloads):
        yield Violation("read in the end", f"nobody read {key} in the end", tuple(operations[-1:]))
    reigns = {hash_: Reign(upload.start, upload.end, [upload.first]) for hash_, upload in uploads.items()}
    reigns[""] = Reign(-math.inf, -math.inf, [])
    for download in downloads:
        seen = _seen(download)
        if seen is None:
            continue
        if download.status == 200 and seen and download.answer["sha256"] != seen:
            yield Violation("whole files", "the bytes pulled have another hash", (download,))
        elif seen not in reigns:
            yield Violation("only what was sent", f"{seen[:12]} of {key} was sent by nobody", (download,))
        elif seen and uploads[seen].is_rejected:
            said = "a file that was refused was pulled"
            yield Violation("refused is not done", said, (*uploads[seen].attempts, download))
        elif download.end < reigns[seen].begun:
            yield Violation("real time", "a file was pulled before it was pushed", (download,))
        else:
            reigns[seen].saw(download)
    yield from _overlapping(key, reigns.values())


@dataclass(slots=True)
class Reign:
    """The time of one version, as far as it shows: `first_end` is when the first operation ended that tells
    of it, `last_start` when the last began. It was the last write at all times between the two, where the
    former is earlier; else at one moment of those between the latter and the former."""

    begun: float
    first_end: float
    shown: list[Operation]
    last_start: float = field(init=False)

    def __post_init__(self) -> None:
        self.last_start = self.begun

    def saw(self, download: Operation) -> None:
        self.first_end = min(self.first_end, download.end)
        self.last_start = max(self.last_start, download.start)
        self.shown.append(download)

    @property
    def is_long(self) -> bool:
        return self.first_end < self.last_start


def _overlapping(key: str, reigns: Iterable[Reign]) -> Iterator[Violation]:
    """Versions of which no order explains what was seen: two at one time, or one at a time of another's."""
    reigns = [reign for reign in reigns if reign.first_end < math.inf]
    long = sorted((reign for reign in reigns if reign.is_long), key=lambda reign: reign.first_end)
    for one, other in pairwise(long):
        if other.first_end < one.last_start:
            said = f"{key} went back to a version after another had been there"
            yield Violation("real time", said, (*one.shown, *other.shown))
    starts = [reign.first_end for reign in long]
    for reign in reigns:
        at = bisect_left(starts, reign.last_start) - 1
        if not reign.is_long and at >= 0 and reign.first_end < long[at].last_start:
            said = f"{key} was another version's throughout the time of this write"
            yield Violation("real time", said, (*reign.shown, *long[at].shown))


def _seen(download: Operation) -> str | None:
    """The hash of what the answer says is there (`""`: nothing), None where it says nothing."""
    if download.status == 304:
        return str(download.sent["known"])
    return str(download.answer["hash"]) if download.status == 200 else None
