"""The judge is not fooled about batches of events: each broken promise, forged into a good history."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from proof.history import END, Operation
from proof.test_judge import operation, violations, without
from proof.test_judge_followers import event, follow

FOLDER = "events/a"


def hash_of(ids: str) -> str:
    return hashlib.sha256(ids.encode()).hexdigest()


def batch(
    ids: str, start: float, end: float, name: str = "", status: int | None = 200, once: str = ""
) -> Operation:
    """A push of events with these ids, each a letter; its file has got a name where that was answered."""
    sent = {"ids": list(ids)} | ({"once": once} if once else {})
    answer = {"hash": hash_of(ids), "timestamp": 1, "batchId": name} if status == 200 else None
    return operation("batch", FOLDER, sent, start, end, status, answer)


def listed(names: Sequence[str], at: float, after: str = "", who: str = "p1") -> Operation:
    answer = {"items": list(names), "hasMore": False}
    return operation("list", FOLDER, {"after": after}, at, at + 0.5, 200, answer, who=who)


def rows(name: str, ids: str) -> Operation:
    answer = {"hash": hash_of(ids), "sha256": hash_of(ids), "ids": list(ids)}
    return operation("rows", f"{FOLDER}/{name}", {}, 40, 41, 200, answer, who=END)


PUSHED = (
    batch("ab", 1, 2, "1"),
    batch("c", 3, 5, status=503, once="k"),
    batch("d", 4, 5, "3"),
    batch("c", 6, 7, "2", once="k"),
    batch("e", 8, 9, status=503),
    batch("f", 8, 9, status=503),
    batch("g", 10, 11, status=401),
)
POLLED = (listed([], 0), listed(["1"], 2), listed(["2", "3"], 5, "1"), listed([], 6, "3"))
FOUND = (
    listed(["1", "2", "3", "4"], 30, who=END),
    rows("1", "ab"),
    rows("2", "c"),
    rows("3", "d"),
    rows("4", "e"),
)
GOOD = (*PUSHED, *POLLED, *FOUND)
ORDERED = Operation(kind="setup", who="run", node=-1, sent={"is_ordered": True, "limit": {}}, start=0, end=0)


def broken(*operations: Operation) -> set[str]:
    """The promises that the judge finds broken, of nodes on which a poller misses nothing."""
    return {violation.promise for violation in violations(ORDERED, *operations)} - {"fresh requests"}


def test_a_good_history_passes() -> None:
    assert broken(*GOOD) == set()


def test_batch_never_listed_or_pulled_in_the_end_is_found() -> None:
    assert broken(*PUSHED, *POLLED) == {"read in the end"}
    assert "read in the end" in broken(*PUSHED, *POLLED, *without(FOUND, 3))


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_batch_that_was_acknowledged_and_is_not_there_is_found(lost: int) -> None:
    names = [name for name in "1234" if name != f"{lost}"]
    there = [listed(names, 30, who=END), *without(FOUND, 0, lost)]
    assert "nothing lost" in broken(*PUSHED, *there)
    assert "nothing lost" not in broken(*PUSHED, listed("123", 30, who=END), *without(FOUND, 0, 4))


@pytest.mark.parametrize(
    ("ids", "promise"),
    [
        ("ab", "once"),
        ("c", "once"),
        ("e", "once"),
        ("x", "only what was sent"),
        ("a", "only what was sent"),
        ("abc", "only what was sent"),
        ("", "only what was sent"),
        ("g", "refused is not done"),
    ],
)
def test_a_file_too_many_is_found(ids: str, promise: str) -> None:
    there = [listed(["1", "2", "3", "4", "5"], 30, who=END), *FOUND[1:], rows("5", ids)]
    assert broken(*PUSHED, *POLLED, *there) == {promise}


def test_answer_without_the_file_is_found() -> None:
    pushed = batch("ab", 1, 2, "3")
    assert "true answers" in broken(pushed, *without(GOOD, 0))
    assert "true answers" in broken(batch("c", 12, 13, "3", once="k"), *GOOD), "told otherwise at first"
    other = replace(PUSHED[0], answer={**PUSHED[0].answer, "hash": hash_of("x")})
    assert broken(other, *without(GOOD, 0)) == {"true hashes"}


def test_a_torn_file_is_found() -> None:
    torn = replace(FOUND[1], answer={**FOUND[1].answer, "sha256": hash_of("x")})
    assert broken(*PUSHED, *POLLED, FOUND[0], torn, *FOUND[2:]) == {"whole files"}


def test_a_list_out_of_order_or_that_begins_too_early_is_found() -> None:
    assert broken(*GOOD, listed(["2", "1"], 20)) == {"sorted lists"}
    assert broken(*GOOD, listed(["1", "2"], 20, "1")) == {"sorted lists"}


def test_a_name_before_that_of_an_earlier_batch_is_found() -> None:
    late = batch("h", 20, 21, "0")
    there = [listed(["0", "1", "2", "3", "4"], 30, who=END), *FOUND[1:], rows("0", "h")]
    assert broken(*PUSHED, late, *there) == {"later names"}


def test_a_batch_that_a_poller_has_passed_is_found_where_that_is_promised() -> None:
    missing = [listed(["1"], 2), listed(["3"], 5, "1")]
    assert broken(*PUSHED, *missing, *FOUND) == {"nothing missed"}
    unordered = violations(*PUSHED, *missing, *FOUND)
    assert {violation.promise for violation in unordered} == {"fresh requests"}
    assert broken(*PUSHED, *missing, listed(["2"], 6, who="p2"), *FOUND) == {"nothing missed"}


EVENTS = [
    event(at, f"{FOLDER}/{name}", hash_of(ids))
    for name, ids, at in (("1", "ab", 2), ("3", "d", 5), ("2", "c", 6), ("4", "e", 9))
]


def test_of_each_batch_a_follower_is_notified_in_any_order() -> None:
    assert broken(*GOOD, follow(), *EVENTS) == set()
    assert broken(*GOOD, follow(), *EVENTS[:3]) == set(), "nobody knows that e was written"
    assert broken(*GOOD, follow(), *EVENTS, event(9.1, f"{FOLDER}/5", hash_of("f"))) == set(), "perhaps f"


def test_batch_without_an_event_or_without_a_push_is_found() -> None:
    for left_out in range(3):
        assert broken(*GOOD, follow(), *without(EVENTS, left_out)) == {"told of each write"}
    early = event(1.5, f"{FOLDER}/5", hash_of("f"))
    assert broken(*GOOD, follow(), early, *EVENTS) == {"told of writes"}
    assert broken(*GOOD, follow(), *EVENTS, event(9.1, f"{FOLDER}/1", hash_of("x"))) == {"told of writes"}
