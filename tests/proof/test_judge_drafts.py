"""The judge is not fooled about drafts that are created and deleted, nor about who is told of it."""

from dataclasses import replace

from proof.documents import hash_of
from proof.history import Operation
from proof.test_judge import broken, operation, violations, without
from proof.test_judge_followers import event, follow

DRAFT = "drafts/a"


def hash_with(id_: str) -> str:
    return hash_of({"id": id_})


def create(id_: str, start: float, end: float, status: int | None = 200, once: str = "") -> Operation:
    answer = {"hash": hash_with(id_), "timestamp": 1} if status == 200 else None
    sent = {"data": {"id": id_}, "once": once or id_}
    return operation("create", DRAFT, sent, start, end, status, answer)


def delete(id_: str, start: float, end: float, status: int | None = 200) -> Operation:
    """Delete what was created with this id."""
    answer = {"hash": "", "timestamp": 1} if status == 200 else None
    sent = {"base": hash_with(id_), "once": f"no {id_}"}
    return operation("delete", DRAFT, sent, start, end, status, answer)


WRITTEN = (
    create("a", 1, 2),
    delete("a", 3, 4, None),
    delete("a", 5, 6),
    create("b", 7, 8, 503),
    create("b", 8, 9),
    delete("b", 10, 11),
    create("c", 12, 13, None),
)
TOLD = (
    event(2, DRAFT, hash_with("a")),
    event(4, DRAFT, ""),
    event(8, DRAFT, hash_with("b")),
    event(12, DRAFT, ""),
)
GOOD = (*WRITTEN, follow(), *TOLD)


def test_good_history_of_a_draft_passes() -> None:
    assert violations(*GOOD) == []
    assert violations(*GOOD, event(14, DRAFT, hash_with("c"))) == [], "whether it was created nobody knows"


def test_creation_or_deletion_without_an_event_is_found() -> None:
    for left_out in range(len(TOLD)):
        told = without(TOLD, left_out)
        expected = set() if left_out == 1 else {"told of each write"}
        assert broken(*WRITTEN, follow(), *told) == expected, "two deletions have one hash"
    assert broken(*WRITTEN, follow(), *TOLD[:3]) == {"told of each write"}


def test_event_of_a_draft_that_nobody_created_is_found() -> None:
    assert broken(*GOOD, event(14, DRAFT, hash_with("x"))) == {"told of writes"}
    assert broken(create("a", 1, 2), follow(), TOLD[0], event(3, DRAFT, "")) == {"told of writes"}
    rejected = create("r", 14, 15, 401)
    assert broken(*GOOD, rejected, event(16, DRAFT, hash_with("r"))) >= {"told of writes"}


def test_wrong_answer_about_a_draft_is_found() -> None:
    wrong = replace(WRITTEN[0], answer={"hash": hash_with("x"), "timestamp": 1})
    assert broken(wrong, *WRITTEN[1:]) == {"true hashes"}
    wrong = replace(WRITTEN[5], answer={"hash": hash_with("b"), "timestamp": 1})
    assert broken(*without(WRITTEN, 5), wrong) == {"true hashes"}
    again = replace(WRITTEN[0], nonce="again", answer={"hash": hash_with("a"), "timestamp": 2})
    assert broken(*WRITTEN, again) == {"true answers"}
    assert broken(*WRITTEN, delete("c", 14, 15, 409)) == {"only known answers"}
