"""Judges the history of one append-only log: one list that only grows.

A log's hash tells how many elements it has and which is the last, so every answer says which state of the
list it is about.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from support import reference_append_log as twin

from proof.history import END, Operation
from proof.order import Sight, out_of_order
from proof.verdict import Violation
from proof.writes import Write, writes

Element = dict[str, Any]


def judge_log(key: str, operations: Iterable[Operation]) -> Iterator[Violation]:
    """What the operations on the log at `key` show to be broken."""
    operations = list(operations)
    appends = appends_of(operations)
    tails = _tails(operations)
    last = _last(operations)
    if last is None:
        yield Violation("read in the end", f"nobody read {key} in the end", tuple(operations[-1:]))
        return
    elements = items(last)
    yield from _not_once(last, elements, appends)
    yield from _unsorted(last, elements)
    hashes = [""] + [twin.log_hash(at, element["data"]) for at, element in enumerate(elements, start=1)]
    position: dict[str, int] = {}
    for at, element in enumerate(elements, start=1):
        position.setdefault(str(element["data"].get("id")), at)
    yield from _answered_otherwise(appends, elements, hashes, position)
    yield from _wrong_tails(tails, elements, hashes)
    yield from _unordered(appends, tails, hashes, position)


def appends_of(operations: Iterable[Operation]) -> list[Write]:
    """The appends that were asked for."""
    requests = [operation for operation in operations if operation.kind == "append"]
    return writes(requests, lambda append: str(append.sent["data"]["id"]))


def elements_of(operations: list[Operation]) -> list[Element]:
    """What the log held in the end."""
    last = _last(operations)
    return [] if last is None else items(last)


def items(tail: Operation) -> list[Element]:
    """The elements of an answer; a log that has none yet is an empty document."""
    found: list[Element] = tail.answer["data"].get("items", [])
    return found


def _tails(operations: list[Operation]) -> list[Operation]:
    return [operation for operation in operations if operation.kind == "tail" and operation.status == 200]


def _last(operations: list[Operation]) -> Operation | None:
    """The last tail, from the first element on, when all others had ended."""
    whole = (tail for tail in _tails(operations) if tail.who == END and "full" in tail.sent)
    return max(whole, key=lambda tail: tail.start, default=None)


def _not_once(last: Operation, elements: list[Element], appends: list[Write]) -> Iterator[Violation]:
    """Elements that were acknowledged and are not there, that are there twice, were refused or never sent."""
    by_id = {str(append.first.sent["data"]["id"]): append for append in appends}
    held = set[str]()
    for at, element in enumerate(elements, start=1):
        id_ = str(element["data"].get("id"))
        append = by_id.get(id_)
        if append is None or append.first.sent["data"] != element["data"]:
            said = f"element {at} of {last.key} was sent by nobody: {element}"
            yield Violation("only what was sent", said, (last,))
        elif id_ in held:
            yield Violation("once", f"{id_} is in {last.key} again at {at}", (*append.attempts, last))
        elif append.is_rejected:
            said = f"{id_}, which was refused, is in {last.key}"
            yield Violation("refused is not done", said, append.attempts)
        held.add(id_)
    for id_, append in by_id.items():
        if append.acknowledged and id_ not in held:
            said = f"{id_}, which was acknowledged, is not in {last.key}"
            yield Violation("nothing lost", said, (*append.acknowledged, last))


def _unsorted(last: Operation, elements: list[Element]) -> Iterator[Violation]:
    for at, (one, other) in enumerate(pairwise(elements), start=2):
        if one["ts"] >= other["ts"]:
            yield Violation(
                "later times", f"element {at} of {last.key} is not later than the one before", (last,)
            )


def _answered_otherwise(
    appends: list[Write], elements: list[Element], hashes: list[str], position: dict[str, int]
) -> Iterator[Violation]:
    """Acknowledgements that do not tell the element's place and time."""
    for append in appends:
        id_ = str(append.first.sent["data"]["id"])
        at = position.get(id_)
        if at is None:
            continue
        for answered in append.acknowledged:
            if (answered.answer["hash"], answered.answer["timestamp"]) != (
                hashes[at],
                elements[at - 1]["ts"],
            ):
                yield Violation("true answers", f"{id_} lies elsewhere than it was told", (answered,))


def _wrong_tails(tails: list[Operation], elements: list[Element], hashes: list[str]) -> Iterator[Violation]:
    """Pulls whose answer is not what the log held when it had the hash that they tell."""
    count = {hash_: at for at, hash_ in enumerate(hashes)}
    times = [element["ts"] for element in elements]
    for tail in tails:
        state = count.get(tail.answer["hash"])
        if state is None:
            said = "an answer tells of a state of the log that never was"
            yield Violation("only what was written", said, (tail,))
            continue
        start = bisect_right(times, tail.sent.get("checkpoint", -1), hi=state)
        start = max(start, state - tail.sent.get("last", state))
        if items(tail) != elements[start:state]:
            said = f"not elements {start + 1} to {state}, which its hash and bounds stand for"
            yield Violation("true tails", said, (tail,))


def _unordered(
    appends: list[Write], tails: list[Operation], hashes: list[str], position: dict[str, int]
) -> Iterator[Violation]:
    """What was appended, or seen, out of the order of real time."""
    count = {hash_: at for at, hash_ in enumerate(hashes)}
    sights = [
        Sight(position[id_], append.start, append.end, append.first, writes=True)
        for append in appends
        if (id_ := str(append.first.sent["data"]["id"])) in position
    ]
    sights += [
        Sight(count[tail.answer["hash"]], tail.start, tail.end, tail)
        for tail in tails
        if tail.answer["hash"] in count
    ]
    for earlier, later in out_of_order(sights):
        said = f"the log's element {later.index} after its element {earlier.index} had been seen"
        yield Violation("real time", said, (earlier.operation, later.operation))
