"""Judges what followers were told: of each write, once, in order, and of nothing else.

A follower is there from when its first stream told it a place. What was written after that it hears of,
through any cut, unless it is told that it cannot be told (a reset).
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from support import reference_append_log as twin

from proof.batches import batches_of, files_of
from proof.documents import hash_of, pushes_of, versions_of
from proof.drafts import drafts_of, hash_after
from proof.files import uploads_of
from proof.history import Operation
from proof.logs import appends_of, elements_of
from proof.verdict import Violation
from proof.writes import Write

ANNOUNCED: Final = ("push", "pull", "create", "delete", "append", "tail", "upload", "download")
"""What is asked about keys that clients choose."""


@dataclass(slots=True)
class Announced:
    """What may be told of one key. `positions` are the versions that it went through, by their hashes, where
    they are known; `begun` is when each that may be told was first asked for. `writes` are those that may be
    told, each with the hash that it left where that is known. Where it has no positions `ended` tells when a
    version was made for certain."""

    positions: Mapping[str, int]
    begun: Mapping[str, float]
    writes: list[tuple[str, Write]] = field(default_factory=list)
    ended: Mapping[str, float] = field(default_factory=dict)
    may_be: Callable[[str], float | None] = lambda hash_: None

    @property
    def owed(self) -> list[tuple[str, Write]]:
        """The writes that must be told."""
        return [(hash_, write) for hash_, write in self.writes if write.acknowledged]


def judge_followers(operations: list[Operation]) -> Iterator[Violation]:
    """What the streams of changes show to be broken; those of who also reads pages are judged with these."""
    streams: defaultdict[str, list[Operation]] = defaultdict(list)
    readers = {operation.who for operation in operations if operation.kind == "changes"}
    for operation in operations:
        if operation.kind in ("follow", "event", "reset") and operation.who not in readers:
            streams[operation.who].append(operation)
    if not streams:
        return
    announced = announced_in(operations)
    for events_of_one in streams.values():
        events = [operation for operation in events_of_one if operation.kind == "event"]
        yield from _out_of_order(events_of_one)
        yield from untrue(events, announced)
        yield from _unordered(events_of_one, announced)
        yield from _overtaken(events_of_one, announced)
        yield from _unheard(events_of_one, announced)


def announced_in(operations: Iterable[Operation]) -> dict[str, Announced]:
    """What may be told of each key."""
    operations = list(operations)
    keys: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind in ANNOUNCED:
            keys[operation.key].append(operation)
    disturbances = [operation for operation in operations if operation.kind in ("stall", "kill")]
    return {key: _of(about, disturbances) for key, about in keys.items()} | _of_batches(operations)


def _of(about: list[Operation], disturbances: list[Operation]) -> Announced:
    if about[0].kind in ("append", "tail"):
        return _of_log(about)
    if about[0].kind in ("create", "delete"):
        return _of_draft(about)
    return _of_document(about, disturbances) if about[0].kind in ("push", "pull") else _of_file(about)


def _of_document(about: list[Operation], disturbances: list[Operation]) -> Announced:
    pushes = [
        (hash_of(push.first.sent["data"]), push)
        for push in pushes_of(about)
        if not push.is_rejected or _is_left_intended(push, disturbances)
    ]
    return Announced(versions_of(about), _begun(pushes), pushes)


def _begun(writes: list[tuple[str, Write]]) -> dict[str, float]:
    """When each version was first asked for, by its hash."""
    begun: dict[str, float] = {}
    for hash_, write in writes:
        begun[hash_] = min(write.start, begun.get(hash_, math.inf))
    return begun


def _is_left_intended(push: Write, disturbances: list[Operation]) -> bool:
    """Whether a node may have died before it could withdraw what it had intended, because Redis stood still:
    nobody knows then that the push was refused."""
    return any(
        stall.start <= attempt.end
        and attempt.start <= stall.end
        and kill.node == attempt.node
        and attempt.start <= kill.start
        for attempt in push.attempts
        for stall in disturbances
        for kill in disturbances
        if (stall.kind, kill.kind) == ("stall", "kill")
    )


def _of_log(about: list[Operation]) -> Announced:
    appends = appends_of(about)
    by_id = {str(append.first.sent["data"]["id"]): append for append in appends}
    positions: dict[str, int] = {}
    begun: dict[str, float] = {}
    for at, element in enumerate(elements_of(about), start=1):
        hash_ = twin.log_hash(at, element["data"])
        positions[hash_] = at
        if (append := by_id.get(str(element["data"].get("id")))) is not None:
            begun[hash_] = append.start
    owed = [(str(append.acknowledged[0].answer["hash"]), append) for append in appends if append.acknowledged]
    doubtful = [append for append in appends if any(attempt.is_unknown for attempt in append.attempts)]

    def may_be(hash_: str) -> float | None:
        """When an append was asked for, of which an attempt may have been announced at another place."""
        for append in doubtful:
            data = append.first.sent["data"]
            if any(twin.log_hash(at, data) == hash_ for at in range(1, len(positions) + len(doubtful) + 1)):
                return append.start
        return None

    return Announced(positions, begun, owed, may_be=may_be)


def _of_draft(about: list[Operation]) -> Announced:
    """All its deletions have one hash, the empty one."""
    made = [(hash_after(write), write) for write in drafts_of(about) if not write.is_rejected]
    return Announced({}, _begun(made), made)


def _of_file(about: list[Operation]) -> Announced:
    """Only of writes that did not overlap it is known which came first."""
    uploads = uploads_of(about)
    named = [(str(upload.first.sent["sha256"]), upload) for upload in uploads]
    made = [(hash_, upload) for hash_, upload in named if not upload.is_rejected]
    ended = {hash_: upload.end for hash_, upload in named}
    return Announced({}, _begun(made), made, ended=ended)


def _of_batches(operations: list[Operation]) -> dict[str, Announced]:
    """By their keys, which the server made: those that it has told, or that were there in the end, and those
    of which only an event tells, for whom nobody knows whose they are."""
    batches = batches_of(operations)
    by_id = {str(batch.first.sent["ids"][0]): batch for batch in batches}
    named = {
        f"{answered.key}/{answered.answer['batchId']}": (str(answered.answer["hash"]), batch)
        for batch in batches
        for answered in batch.acknowledged
    }
    for file in files_of(operations).values():
        if file.answer["ids"] and (batch := by_id.get(str(file.answer["ids"][0]))) is not None:
            named.setdefault(file.key, (str(file.answer["hash"]), batch))
    announced = {
        key: Announced({}, {hash_: batch.start}, [(hash_, batch)]) for key, (hash_, batch) in named.items()
    }
    begun = min((batch.start for batch in batches if batch.is_unknown), default=None)
    folders = {batch.first.key for batch in batches}
    for operation in operations:
        if operation.kind == "event" and operation.key.rpartition("/")[0] in folders:
            announced.setdefault(operation.key, Announced({}, {}, may_be=lambda _: begun))
    return announced


def _out_of_order(events_of_one: list[Operation]) -> Iterator[Violation]:
    """Ids that are told again, or do not grow."""
    received = [operation for operation in events_of_one if operation.kind in ("event", "reset")]
    for earlier, later in pairwise(received):
        if later.sent["id"] <= earlier.sent["id"]:
            said = f"{later.who} was told of {later.sent['id']} after {earlier.sent['id']}"
            yield Violation("told once", said, (earlier, later))


def untrue(events: list[Operation], announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """Events of what nobody wrote, or was refused, or before it was asked for."""
    for event in events:
        about, hash_ = announced.get(event.key), str(event.answer["hash"])
        begun = None if about is None else about.begun.get(hash_)
        if begun is None and about is not None:
            begun = about.may_be(hash_)
        if begun is None:
            said = f"{event.who} was told of version {hash_[:12]} of {event.key}, which nobody wrote"
            yield Violation("told of writes", said, (event,))
        elif event.end < begun:
            said = f"{event.who} was told of version {hash_[:12]} of {event.key} before it was asked for"
            yield Violation("told of writes", said, (event,))


def _unordered(events_of_one: list[Operation], announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """First events of versions of one document after those of later ones, but for what was asked for before a
    reset, and so was read anew after it."""
    newest: dict[str, tuple[int, Operation]] = {}
    seen = set[tuple[str, str]]()
    reset_at = -math.inf
    for event in events_of_one:
        if event.kind == "reset":
            reset_at = event.end
        about = announced.get(event.key)
        if event.kind != "event" or about is None:
            continue
        hash_ = str(event.answer["hash"])
        position = about.positions.get(hash_)
        if position is None or (event.key, hash_) in seen or about.begun.get(hash_, math.inf) < reset_at:
            continue
        seen.add((event.key, hash_))
        if event.key in newest and newest[event.key][0] > position:
            later, shown = newest[event.key]
            said = f"{event.who} was told of version {position} of {event.key} after version {later}"
            yield Violation("told in order", said, (shown, event))
        else:
            newest[event.key] = position, event


def _overtaken(events_of_one: list[Operation], announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """First events of files that had been made when those were asked for that were told before, likewise."""
    newest: dict[str, tuple[float, Operation]] = {}
    seen = set[tuple[str, str]]()
    reset_at = -math.inf
    for event in events_of_one:
        if event.kind == "reset":
            reset_at = event.end
        about = announced.get(event.key)
        if event.kind != "event" or about is None or not about.ended:
            continue
        hash_ = str(event.answer["hash"])
        begun = about.begun.get(hash_)
        if begun is None or begun < reset_at or (event.key, hash_) in seen:
            continue
        seen.add((event.key, hash_))
        later = newest.get(event.key)
        if later is not None and about.ended[hash_] < later[0]:
            said = f"{event.who} was told of {hash_[:12]} of {event.key} after what came later"
            yield Violation("told in order", said, (later[1], event))
        if later is None or begun > later[0]:
            newest[event.key] = begun, event


def _unheard(events_of_one: list[Operation], announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """Writes that were made while a follower was there, of which it was told neither then nor later."""
    who = events_of_one[0].who
    opened = [one.sent["opened"] for one in events_of_one if one.kind == "follow" and "opened" in one.sent]
    if not opened:
        return
    there_from = min(opened)
    resets = sorted(one.end for one in events_of_one if one.kind == "reset")
    last_seen: defaultdict[tuple[str, str], float] = defaultdict(lambda: -math.inf)
    for event in events_of_one:
        if event.kind == "event":
            name = event.key, str(event.answer["hash"])
            last_seen[name] = max(last_seen[name], event.end)
    for key, about in announced.items():
        for hash_, write in about.owed:
            if write.start < there_from or last_seen[key, hash_] >= write.start:
                continue
            # A reset has the follower read anew what was written before it.
            if bisect_left(resets, write.start) == len(resets):
                said = f"{who} was not told of version {hash_[:12]} of {key}"
                yield Violation("told of each write", said, write.acknowledged)
