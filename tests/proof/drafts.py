"""Judges the history of one draft: a document that one client creates, deletes, and creates again."""

from collections.abc import Iterable, Iterator

from proof.documents import hash_of
from proof.history import Operation
from proof.verdict import Violation
from proof.writes import Write, writes


def drafts_of(operations: Iterable[Operation]) -> list[Write]:
    """The creations and deletions that were asked for; no two create the same data."""
    requests = [operation for operation in operations if operation.kind in ("create", "delete")]
    return writes(requests, lambda write: str(write.sent["once"]))


def hash_after(write: Write) -> str:
    """The hash of the draft after this write, `""` after a deletion."""
    return hash_of(write.first.sent["data"]) if write.first.kind == "create" else ""


def judge_draft(operations: Iterable[Operation]) -> Iterator[Violation]:
    """The answers about one draft that are wrong."""
    for write in drafts_of(operations):
        for attempt in write.acknowledged:
            if attempt.answer["hash"] != hash_after(write):
                yield Violation("true hashes", f"a {attempt.kind} was answered another hash", (attempt,))
        if len({attempt.answer.get("timestamp") for attempt in write.acknowledged}) > 1:
            yield Violation("true answers", "a repeated write was told another time", write.acknowledged)
