"""Judges what readers of `/changes` were told: who has caught up knows of all that was acknowledged before.

A reader turns pages, now and then follows the stream from where it is, and goes back to pages. It begins anew
at the oldest change, at `now`, or after a reset, and what it was told since then is one life. A feed that
remembers tells each write once, in order, and never resets anybody.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from proof.follower import key_of
from proof.followers import Announced, announced_in, untrue
from proof.history import Operation
from proof.verdict import Violation
from proof.writes import Write


@dataclass(slots=True)
class Life:
    """The pages, events and resets of a reader since it began anew, and the changes that these told. It need
    not be told of what was asked for before `begun`."""

    begun: float
    steps: list[Operation] = field(default_factory=list)
    told: list[Operation] = field(default_factory=list)

    def caught_up(self) -> list[Operation]:
        """The pages after which there was nothing more."""
        return [step for step in self.steps if _has_caught_up(step)]


def judge_feeds(operations: list[Operation]) -> Iterator[Violation]:
    """What the pages of changes show to be broken."""
    readers: dict[str, list[Operation]] = {
        operation.who: [] for operation in operations if operation.kind == "changes"
    }
    for operation in operations:
        is_page = operation.kind == "changes" and operation.status == 200
        if operation.who in readers and (is_page or operation.kind in ("event", "reset")):
            readers[operation.who].append(operation)
    remembers = any(one.kind == "setup" and one.sent.get("remembers", False) for one in operations)
    lives = {who: list(_lives(steps)) for who, steps in readers.items()}
    entries = [told for own in lives.values() for life in own for told in life.told]
    announced = announced_in([*operations, *entries]) if readers else {}
    yield from untrue(entries, announced)
    for who, own in lives.items():
        if not own or not _has_caught_up(own[-1].steps[-1]):
            yield Violation("read in the end", f"{who} did not read its feed to the end", ())
            continue
        for life in own:
            yield from _backwards(life)
            if remembers:
                yield from _forgotten(life)
                yield from _repeated(life, announced)
                yield from _unordered(life, announced)
                yield from _mistimed(life, announced)
                yield from _untold(life, life.caught_up(), announced)
        if not remembers:  # changes may come late
            yield from _untold(own[-1], own[-1].steps[-1:], announced)


def _has_caught_up(step: Operation) -> bool:
    return step.kind == "changes" and not (step.answer.get("hasMore") or step.answer.get("reset"))


def _lives(steps: list[Operation]) -> Iterator[Life]:
    life: Life | None = None
    for step in steps:
        since = step.sent.get("since", "") if step.kind == "changes" else None
        is_reset = step.kind == "reset" or (step.kind == "changes" and step.answer.get("reset", False))
        if life is None or is_reset or since in ("", "now"):
            if life is not None:
                yield life
            life = Life(-math.inf if since == "" and not is_reset else step.end)
        life.steps.append(step)
        life.told += _changes_in(step)
    if life is not None:
        yield life


def _changes_in(step: Operation) -> list[Operation]:
    """The changes that a page, or an event, tells, as events."""
    if step.kind == "event":
        return [step]
    changes = step.answer.get("changes", []) if step.kind == "changes" else []
    return [
        Operation(
            kind="event",
            who=step.who,
            node=step.node,
            key=key_of(change),
            start=step.start,
            end=step.end,
            answer=change,
            line=step.line,
        )
        for change in changes
    ]


def _backwards(life: Life) -> Iterator[Violation]:
    """Pages and events that do not lead on, and pages that tell of a document twice."""
    at = ""
    for step in life.steps:
        told = _changes_in(step)
        id_ = str(step.answer["cursor"] if step.kind == "changes" else step.sent["id"])
        position = id_.partition("~")[0]
        leads_on = position > at and not position.startswith(f"{at}-")
        must_lead_on = told or (step.kind == "changes" and step.answer.get("hasMore"))
        if at and not leads_on and (must_lead_on or position < at):
            yield Violation("fed in order", f"{step.who} was led from {at} to {id_}", (step,))
        at = position
        for key, count in Counter(entry.key for entry in told).items():
            if count > 1:
                yield Violation("fed once", f"{step.who} was told of {key} twice in a page", (step,))


def _forgotten(life: Life) -> Iterator[Violation]:
    for step in life.steps:
        if step.kind == "changes" and step.answer.get("reset"):
            yield Violation("fed from the oldest", f"{step.who} was told that changes are forgotten", (step,))


def _repeated(life: Life, announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """Changes that were told more often than they were made."""
    counts = Counter[tuple[str, str]]()
    for entry in life.told:
        hash_, about = _hash(entry), announced.get(entry.key)
        if about is None:
            continue
        counts[entry.key, hash_] += 1
        made = 1 if about.positions else sum(hash_ == left for left, _ in about.writes)
        if counts[entry.key, hash_] > max(1, made):
            said = f"{entry.who} was told of version {hash_[:12]} of {entry.key} again"
            yield Violation("fed once", said, (entry,))


def _unordered(life: Life, announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """Versions that were told after later ones, or never were."""
    newest: dict[str, tuple[int, Operation]] = {}
    for entry in life.told:
        about = announced.get(entry.key)
        if about is None or not about.positions:
            continue
        position = about.positions.get(_hash(entry))
        earlier = newest.get(entry.key)
        if position is None:
            said = f"{entry.who} was told of version {_hash(entry)[:12]} of {entry.key}, which never was"
            yield Violation("told of writes", said, (entry,))
        elif earlier is not None and position < earlier[0]:
            said = f"{entry.who} was told of version {position} of {entry.key} after version {earlier[0]}"
            yield Violation("fed in order", said, (earlier[1], entry))
        else:
            newest[entry.key] = position, entry


def _mistimed(life: Life, announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """Changes with another time than their writers were told; a file's is when it was stored."""
    times: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    unknown = set[tuple[str, str]]()
    for key, about in announced.items():
        for hash_, write in about.writes:
            if write.first.kind in ("upload", "batch"):
                continue
            times[key, hash_].update(attempt.answer["timestamp"] for attempt in write.acknowledged)
            if write.is_unknown:
                unknown.add((key, hash_))
    for entry in life.told:
        name = entry.key, _hash(entry)
        if name not in unknown and times[name] and entry.answer["timestamp"] not in times[name]:
            said = f"{entry.who} was told another time of version {name[1][:12]} of {entry.key}"
            yield Violation("fed true times", said, (entry,))


def _untold(life: Life, pages: list[Operation], announced: Mapping[str, Announced]) -> Iterator[Violation]:
    """Writes that had been acknowledged when one of these pages was asked for, of which its reader was told
    neither then nor before."""
    told: defaultdict[str, list[Operation]] = defaultdict(list)
    for entry in life.told:
        told[entry.key].append(entry)
    starts = [page.start for page in pages]
    for key, about in announced.items():
        ends = [entry.end for entry in told[key]]
        for hash_, write in about.owed:
            after = bisect_right(starts, write.end)
            if write.start <= life.begun or after == len(pages):
                continue
            page = pages[after]
            until = bisect_right(ends, page.end)
            since = told[key][bisect_left(ends, write.start) : until] if until else _absent(life, about, key)
            if not any(_covers(about, entry, hash_, write) for entry in since):
                said = f"{page.who} had caught up and was not told of version {hash_[:12]} of {key}"
                yield Violation("fed each write", said, (*write.acknowledged, page))


def _absent(life: Life, about: Announced, key: str) -> list[Operation]:
    """What a reader knows who began with the oldest change and was told nothing: the key was removed."""
    if life.begun > -math.inf or about.positions:
        return []
    return [replace(life.steps[0], kind="event", key=key, answer={"hash": ""})]


def _covers(about: Announced, entry: Operation, hash_: str, write: Write) -> bool:
    """Whether who is told of this then reads what a write left, or something later."""
    told = _hash(entry)
    if about.positions:
        return about.positions.get(told, math.inf) >= about.positions.get(hash_, 0)
    return any(
        left == told and other.start <= entry.end and other.end >= write.start for left, other in about.writes
    )


def _hash(entry: Operation) -> str:
    return str(entry.answer["hash"])
