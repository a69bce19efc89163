"""Judges a history: every promise that many nodes make together."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from proof.batches import judge_batches
from proof.documents import judge_document
from proof.drafts import judge_draft
from proof.feeds import judge_feeds
from proof.files import judge_file
from proof.followers import judge_followers
from proof.history import Kind, Operation, read
from proof.logs import judge_log
from proof.verdict import Verdict, Violation

ANSWERS: Final[dict[Kind, frozenset[int]]] = {
    "pull": frozenset({200, 304, 401}),
    "push": frozenset({200, 409, 401}),
    "create": frozenset({200, 401}),
    "delete": frozenset({200, 401}),
    "append": frozenset({200, 401}),
    "tail": frozenset({200, 401}),
    "upload": frozenset({200, 401}),
    "download": frozenset({200, 304, 401}),
    "batch": frozenset({200, 401}),
    "list": frozenset({200, 401}),
    "rows": frozenset({200, 401}),
    "metered": frozenset({200, 429}),
    "replay": frozenset({401}),
    "changes": frozenset({200}),
    "follow": frozenset({200}),
}
"""What may be answered, beside 503. A 401 is for all but one of the requests that are equal."""

NOT_ADMITTED: Final = frozenset({401, 429})
"""Whoever is answered otherwise has passed the replay memory; after a 5xx nobody knows."""


def judge(path: Path) -> Verdict:
    """The verdict on the history in the file `path`."""
    return judge_operations(read(path))


def judge_operations(operations: list[Operation]) -> Verdict:
    violations = [
        *_judge_keys(operations),
        *_judge_folders(operations),
        *_judge_replies(operations),
        *_judge_nonces(operations),
        *_judge_limit(operations),
        *judge_followers(operations),
        *judge_feeds(operations),
    ]
    return Verdict(counts(operations), violations)


def counts(operations: list[Operation]) -> Counter[str]:
    """How much there was to judge: answers by kind of request, and replays of what was answered before a node
    died, sent when it served again."""
    counted = Counter(
        f"{operation.kind} {'unknown' if operation.is_unknown else operation.status}"
        for operation in operations
        if operation.kind in ANSWERS
    )
    kills = [operation for operation in operations if operation.kind == "kill"]
    happened = ("kill", "stall", "loss", "event", "reset")
    counted.update(operation.kind for operation in operations if operation.kind in happened)
    for operation in operations:
        if operation.kind == "changes" and operation.status == 200:
            counted["change on a page"] += len(operation.answer.get("changes", ()))
        if operation.kind == "faults":
            counted.update({f"fault {name}": count for name, count in operation.sent.items()})
    ended = {operation.nonce: operation.end for operation in operations if operation.kind != "replay"}
    counted["replay after a kill"] = sum(
        operation.kind == "replay"
        and any(ended[operation.nonce] < kill.start and kill.end < operation.start for kill in kills)
        for operation in operations
    )
    return counted


def _judge_keys(operations: Iterable[Operation]) -> Iterator[Violation]:
    """What became of each document, each draft, each log and each file."""
    documents: defaultdict[str, list[Operation]] = defaultdict(list)
    drafts: defaultdict[str, list[Operation]] = defaultdict(list)
    logs: defaultdict[str, list[Operation]] = defaultdict(list)
    files: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.kind in ("pull", "push"):
            documents[operation.key].append(operation)
        elif operation.kind in ("create", "delete"):
            drafts[operation.key].append(operation)
        elif operation.kind in ("append", "tail"):
            logs[operation.key].append(operation)
        elif operation.kind in ("upload", "download"):
            files[operation.key].append(operation)
    for key, about in documents.items():
        yield from judge_document(key, about)
    for about in drafts.values():
        yield from judge_draft(about)
    for key, about in logs.items():
        yield from judge_log(key, about)
    for key, about in files.items():
        yield from judge_file(key, about)


def _judge_folders(operations: Iterable[Operation]) -> Iterator[Violation]:
    """What became of the batches of events."""
    folders: defaultdict[str, list[Operation]] = defaultdict(list)
    is_ordered = False
    for operation in operations:
        if operation.kind == "setup":
            is_ordered = operation.sent.get("is_ordered", False)
        elif operation.kind in ("batch", "list"):
            folders[operation.key].append(operation)
        elif operation.kind == "rows":
            folders[operation.key.rpartition("/")[0]].append(operation)
    for key, about in folders.items():
        yield from judge_batches(key, about, is_ordered=is_ordered)


def _judge_replies(operations: Iterable[Operation]) -> Iterator[Violation]:
    """Answers that nobody should get, whatever fails."""
    for operation in operations:
        answers = ANSWERS.get(operation.kind)
        if answers is None or operation.status in (None, 503) or operation.status in answers:
            continue
        if operation.status == 409 and operation.is_unknown:
            continue
        promise = "no replay" if operation.kind == "replay" else "only known answers"
        said = f"a {operation.kind} was answered {operation.status}"
        yield Violation(promise, said, (operation,))


def _judge_nonces(operations: Iterable[Operation]) -> Iterator[Violation]:
    """Of requests that are equal byte for byte at most one is admitted; and exactly one, where each has been
    answered."""
    equal: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.nonce:
            equal[operation.nonce].append(operation)
    for sent in equal.values():
        admitted = [one for one in sent if not one.is_unknown and one.status not in NOT_ADMITTED]
        if len(admitted) > 1:
            said = f"a request was admitted {len(admitted)} times"
            yield Violation("no replay", said, tuple(admitted))
        if not admitted and not any(one.is_unknown or one.status == 429 for one in sent):
            yield Violation("fresh requests", "a request was refused as if it were a replay", tuple(sent))


def _judge_limit(operations: list[Operation]) -> Iterator[Violation]:
    """More requests admitted than the windows could hold in which they must have been counted."""
    setups = [operation.sent for operation in operations if operation.kind == "setup"]
    admitted = [one for one in operations if one.kind == "metered" and one.status == 200]
    by_key: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in admitted:
        by_key[operation.key].append(operation)
    for metered in by_key.values():
        yield from _overfull(metered, setups[0]["limit"])


def _overfull(admitted: list[Operation], limit: dict[str, Any]) -> Iterator[Violation]:
    """Spans of windows that hold more than they may. Each request was counted in one of the windows between
    its start and its end, nobody knows which; they fit exactly where every span of windows has room for
    those that were counted within it."""
    window_ms, most = limit["window_ms"], limit["max_requests"]
    within: defaultdict[tuple[int, int], list[Operation]] = defaultdict(list)
    for operation in admitted:
        span = operation.sent["from_ms"] // window_ms, operation.sent["to_ms"] // window_ms
        within[span].append(operation)
    by_end = sorted(within, key=lambda span: span[1])
    overfull: list[tuple[int, list[Operation]]] = []
    for first in sorted({start for start, _ in within}):
        counted: list[Operation] = []
        for start, end in by_end:
            if start < first:
                continue
            counted += within[start, end]
            if len(counted) > most * (end - first + 1):
                overfull.append((end - first + 1, list(counted)))
                break
    if overfull:
        windows, counted = min(overfull, key=lambda found: found[0])
        said = f"{len(counted)} requests in {windows} windows of {most}"
        yield Violation("limits hold", said, tuple(counted))
