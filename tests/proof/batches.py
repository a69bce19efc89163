"""Judges the history of batches of events: each that was acknowledged is one file, and no other is there.

The server names the files. What is in them tells whose they are: each event has an id of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from proof.history import END, Operation
from proof.order import Sight, out_of_order
from proof.verdict import Violation
from proof.writes import Write, writes


def batches_of(operations: Iterable[Operation]) -> list[Write]:
    """The batches that were pushed."""
    requests = [operation for operation in operations if operation.kind == "batch"]
    return writes(requests, lambda batch: str(batch.sent["ids"][0]))


def files_of(operations: Iterable[Operation]) -> dict[str, Operation]:
    """The files that were there in the end by their ids, each as it was pulled."""
    return {operation.key.rpartition("/")[2]: operation for operation in operations if _is_file(operation)}


def judge_batches(key: str, operations: Iterable[Operation], *, is_ordered: bool) -> Iterator[Violation]:
    """What the operations on the batches in the folder `key` show to be broken. `is_ordered`: who lists from
    the last name that it has seen misses none."""
    operations = list(operations)
    batches = batches_of(operations)
    lists = [operation for operation in operations if operation.kind == "list" and operation.status == 200]
    last = [listed for listed in lists if listed.who == END]
    if not last:
        yield Violation("read in the end", f"nobody listed {key} in the end", tuple(operations[-1:]))
        return
    names = [name for listed in last for name in listed.answer["items"]]
    files = files_of(operations)
    for name in sorted(set(names).symmetric_difference(files)):
        yield Violation("read in the end", f"nobody pulled {name}, or it was not listed", tuple(last))
    yield from _not_once(key, files, batches)
    yield from _untrue_replies(files, batches)
    yield from _unsorted(lists)
    yield from _late_names(batches)
    if is_ordered:
        yield from _missed(sorted(names), lists)


def _is_file(operation: Operation) -> bool:
    return operation.kind == "rows" and operation.who == END and operation.status == 200


def _not_once(key: str, files: dict[str, Operation], batches: list[Write]) -> Iterator[Violation]:
    """Batches that were acknowledged and are not there, that are there twice, were refused or never sent."""
    by_id = {str(id_): batch for batch in batches for id_ in batch.first.sent["ids"]}
    held = Counter[str]()
    for name, file in files.items():
        ids = file.answer["ids"]
        batch = by_id.get(str(ids[0])) if ids else None
        if batch is None or batch.first.sent["ids"] != ids:
            yield Violation("only what was sent", f"{name} of {key} is nobody's batch", (file,))
            continue
        held[ids[0]] += 1
        if held[ids[0]] > 1:
            yield Violation("once", f"{name} is a batch again", (*batch.attempts, file))
        elif batch.is_rejected:
            yield Violation("refused is not done", f"{name} was refused", (*batch.attempts, file))
    for batch in batches:
        if batch.acknowledged and not held[batch.first.sent["ids"][0]]:
            said = f"a batch that was acknowledged is not in {key}"
            yield Violation("nothing lost", said, batch.acknowledged)


def _untrue_replies(files: dict[str, Operation], batches: list[Write]) -> Iterator[Violation]:
    """Names and hashes that are not those of the file."""
    for file in files.values():
        if file.answer["hash"] != file.answer["sha256"]:
            yield Violation("whole files", "the bytes pulled have another hash", (file,))
    for batch in batches:
        for answered in batch.acknowledged:
            there = files.get(answered.answer["batchId"])
            if there is None or there.answer["ids"] != answered.sent["ids"]:
                yield Violation("true answers", "a batch lies elsewhere than it was told", batch.attempts)
            elif there.answer["hash"] != answered.answer["hash"]:
                yield Violation("true hashes", "a batch was answered another hash", (answered, there))


def _unsorted(lists: list[Operation]) -> Iterator[Violation]:
    for listed in lists:
        listed_names = [listed.sent["after"], *listed.answer["items"]]
        if any(one >= other for one, other in pairwise(listed_names)):
            yield Violation("sorted lists", "a list is not in its order", (listed,))


def _late_names(batches: list[Write]) -> Iterator[Violation]:
    """Names that come before that of a batch which had been acknowledged when they were asked for."""
    acknowledged = [
        (batch.acknowledged[0].answer["batchId"], batch) for batch in batches if batch.acknowledged
    ]
    acknowledged.sort(key=lambda named: named[0])
    sights = [
        Sight(at, batch.start, batch.end, batch.acknowledged[0]) for at, (_, batch) in enumerate(acknowledged)
    ]
    for earlier, later in out_of_order(sights):
        shown = earlier.operation, later.operation
        yield Violation("later names", "a name comes before that of an earlier batch", shown)


def _missed(names: list[str], lists: list[Operation]) -> Iterator[Violation]:
    """What a poller has passed without seeing it."""
    for who in sorted({listed.who for listed in lists} - {END}):
        own = [listed for listed in lists if listed.who == who]
        seen = {name for listed in own for name in listed.answer["items"]}
        passed = max(seen, default="")
        for name in names:
            if name <= passed and name not in seen:
                shown = next(listed for listed in own if listed.answer["items"][-1:] > [name])
                yield Violation("nothing missed", f"{who} listed on from {passed} without {name}", (shown,))
