"""Judges the history of one document: a chain of versions, each pushed on top of the one before.

Every push names its base, so what stands there in the end tells how it came to be: who wrote it, on what
base, who wrote that, and so on down to nothing. `n` of a document's data is its place in that chain.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from support import reference

from proof.history import END, Operation
from proof.order import Sight, out_of_order
from proof.verdict import Violation
from proof.writes import Write, writes


def judge_document(key: str, operations: Iterable[Operation]) -> Iterator[Violation]:
    """What the operations on the document at `key` show to be broken."""
    operations = list(operations)
    pushes = pushes_of(operations)
    pulls = _pulls(operations)
    last = _last(operations)
    yield from _untrue_replies(pushes, pulls)
    yield from _two_winners(pushes)
    if last is None:
        yield Violation("read in the end", f"nobody read {key} in the end", tuple(operations[-1:]))
        return
    yield from _miscounted(last, pushes)
    chain, broken = _chain(last, pushes)
    yield from broken
    index = {hash_: at for at, (hash_, _) in enumerate(chain, start=1)} | {"": 0}
    yield from _lost(last, pushes, index)
    if not any(violation.promise == "only what was sent" for violation in broken):
        yield from _unordered(chain, index, operations)


def pushes_of(operations: Iterable[Operation]) -> list[Write]:
    """The pushes that were asked for."""
    requests = [operation for operation in operations if operation.kind == "push"]
    return writes(requests, lambda push: str(push.sent.get("once", push.nonce)))


def versions_of(operations: list[Operation]) -> dict[str, int]:
    """The versions that a document went through, by their hashes, counted from 1."""
    last = _last(operations)
    chain = [] if last is None else _chain(last, pushes_of(operations))[0]
    return {hash_: at for at, (hash_, _) in enumerate(chain, start=1)}


def hash_of(data: Any) -> str:
    return hashlib.sha256(reference.canonical(data).encode()).hexdigest()


def _pulls(operations: list[Operation]) -> list[Operation]:
    return [operation for operation in operations if operation.kind == "pull" and operation.status == 200]


def _last(operations: list[Operation]) -> Operation | None:
    """The last pull when all others had ended."""
    pulls = (pull for pull in _pulls(operations) if pull.who == END)
    return max(pulls, key=lambda pull: pull.start, default=None)


def _untrue_replies(pushes: list[Write], pulls: list[Operation]) -> Iterator[Violation]:
    """Hashes that are not of the data, conflicts with the very base that was sent or with the push itself,
    repetitions that are told another time."""
    writers = Counter(hash_of(push.first.sent["data"]) for push in pushes)
    for push in pushes:
        own = hash_of(push.first.sent["data"])
        if len({attempt.answer.get("timestamp") for attempt in push.acknowledged}) > 1:
            yield Violation("true answers", "a repeated push was told another time", push.acknowledged)
        for attempt in push.attempts:
            current = attempt.answer["currentHash"] if _conflicts(attempt) else None
            if current == own and writers[own] == 1:
                yield Violation("true conflicts", "a push conflicted with itself", push.attempts)
            if attempt.status == 200 and attempt.answer["hash"] != own:
                yield Violation("true hashes", "a push was answered another hash", (attempt,))
            if current == (attempt.sent["base"] or ""):
                yield Violation("true conflicts", "a conflict with the base that was sent", (attempt,))
    for pull in pulls:
        data, hash_ = pull.answer["data"], pull.answer["hash"]
        if hash_ != (hash_of(data) if data else ""):
            yield Violation("true hashes", "the data pulled has another hash", (pull,))


def _two_winners(pushes: list[Write]) -> Iterator[Violation]:
    """Two pushes with one base of which exactly one may succeed."""
    winners: defaultdict[str, list[Operation]] = defaultdict(list)
    for push in pushes:
        if push.acknowledged:
            winners[push.first.sent["base"] or ""].append(push.acknowledged[0])
    for base, won in winners.items():
        if len(won) > 1:
            yield Violation("one winner", f"{len(won)} pushes won with base {base[:12]!r}", tuple(won))


def _miscounted(last: Operation, pushes: list[Write]) -> Iterator[Violation]:
    """A value that is not the number of pushes that were made."""
    made = sum(bool(push.acknowledged) for push in pushes)
    unknown = sum(push.is_unknown for push in pushes)
    value = last.answer["data"].get("n", 0)
    if not made <= value <= made + unknown:
        said = f"{last.key} is {value} after {made} increments that succeeded and {unknown} unknown ones"
        yield Violation("counted increments", said, (last,))


def _chain(last: Operation, pushes: list[Write]) -> tuple[list[tuple[str, Write]], list[Violation]]:
    """The versions up to the last, oldest first, each with the push that wrote it, and what is wrong with
    them. Where one was written by nobody the chain is only what came after it."""
    by_hash: defaultdict[str, list[Write]] = defaultdict(list)
    for push in pushes:
        by_hash[hash_of(push.first.sent["data"])].append(push)
    chain: list[tuple[str, Write]] = []
    broken: list[Violation] = []
    seen = set[str]()
    hash_ = last.answer["hash"]
    while hash_ and hash_ not in seen:
        seen.add(hash_)
        # Made for certain, or perhaps; what was refused only where nobody else wrote it.
        writers = sorted(by_hash[hash_], key=lambda push: (push.is_rejected, push.is_unknown))
        if not writers:
            said = f"version {hash_[:12]} of {last.key} was written by nobody"
            broken.append(Violation("only what was sent", said, (last,)))
            break
        writer = writers[0]
        if writer.is_rejected:
            broken.append(Violation("refused is not done", "a refused push was made", writer.attempts))
        chain.append((hash_, writer))
        hash_ = writer.first.sent["base"] or ""
    chain.reverse()
    if not broken:
        for at, (_, push) in enumerate(chain, start=1):
            if push.first.sent["data"]["n"] != at:
                said = f"version {at} of {last.key} says otherwise"
                broken.append(Violation("counted increments", said, push.attempts))
    return chain, broken


def _lost(last: Operation, pushes: list[Write], index: dict[str, int]) -> Iterator[Violation]:
    for push in pushes:
        if push.acknowledged and hash_of(push.first.sent["data"]) not in index:
            said = f"a push that succeeded is not in what {last.key} has become"
            yield Violation("nothing lost", said, (*push.acknowledged, last))


def _unordered(
    chain: list[tuple[str, Write]], index: dict[str, int], operations: list[Operation]
) -> Iterator[Violation]:
    """Answers about versions that were old when they were asked for, or never were."""
    sights = [
        Sight(at, push.start, push.end, push.first, writes=True)
        for at, (_, push) in enumerate(chain, start=1)
    ]
    for operation in operations:
        seen = _seen(operation)
        if seen is None:
            continue
        if seen in index:
            sights.append(Sight(index[seen], operation.start, operation.end, operation))
        else:
            said = f"an answer tells of version {seen[:12]}, which never was"
            yield Violation("only what was written", said, (operation,))
    for earlier, later in out_of_order(sights):
        said = f"version {later.index} after version {earlier.index} had been seen"
        yield Violation("real time", said, (earlier.operation, later.operation))


def _seen(operation: Operation) -> str | None:
    """The hash of the version that the answer says is there, None where it says nothing."""
    if operation.kind == "pull" and operation.status == 200:
        return str(operation.answer["hash"])
    if operation.kind == "pull" and operation.status == 304:
        return str(operation.sent["known"])
    if operation.kind == "push" and _conflicts(operation):
        return str(operation.answer["currentHash"])
    return None


def _conflicts(push: Operation) -> bool:
    """True if the push was answered that another version is there."""
    return push.status == 409 and not push.is_unknown
