"""The judge is not fooled about files: each broken promise, forged into a good history."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from proof.files import content, sha256_of
from proof.history import END, Operation
from proof.test_judge import broken, operation, without
from proof.test_judge_followers import event, follow, reset

FILE = "files/a"
HASHES = {name: sha256_of(name, 10) for name in "abcdx"} | {"": ""}


def upload(name: str, start: float, end: float, status: int | None = 200) -> Operation:
    sent = {"sha256": HASHES[name], "size": 10}
    answer = {"hash": HASHES[name], "timestamp": 1} if status == 200 else None
    return operation("upload", FILE, sent, start, end, status, answer)


def download(name: str, start: float, end: float, who: str = "c2") -> Operation:
    answer = {"hash": HASHES[name]} | ({"sha256": HASHES[name]} if name else {})
    return operation("download", FILE, {}, start, end, 200, answer, who=who)


def unchanged(name: str, start: float, end: float) -> Operation:
    return operation("download", FILE, {"known": HASHES[name]}, start, end, 304)


GOOD = (
    download("", 0, 1.5),
    upload("a", 1, 2),
    download("a", 3, 4),
    upload("b", 5, 10),
    upload("c", 5, 10),
    download("b", 6, 7),
    unchanged("c", 8, 9),
    upload("d", 11, 12, 503),
    download("c", 11.5, 13),
    download("d", 14, 15),
    download("d", 30, 31, END),
)


def test_a_good_history_passes() -> None:
    assert broken(*GOOD) == set()
    assert broken(download("", 1, 2, END)) == set()
    assert broken(upload("a", 1, 2, 503), download("", 3, 4, END)) == set(), "it may come later"


def test_names_have_contents_of_their_own_of_any_size() -> None:
    contents = [content(name, size) for name in ("a", "ab", "b") for size in (0, 1, 7, 1000)]
    assert {body.partition(b"\n")[0] for body in contents} == {b"a", b"ab", b"b"}
    assert [len(body) for body in contents[:4]] == [2, 2, 7, 1000]


def test_bytes_that_are_not_those_of_the_hash_are_found() -> None:
    torn = replace(GOOD[2], answer={"hash": HASHES["a"], "sha256": HASHES["b"]})
    assert broken(*without(GOOD, 2), torn) == {"whole files"}


def test_upload_answered_with_another_hash_is_found() -> None:
    assert broken(*without(GOOD, 1), replace(GOOD[1], answer={"hash": HASHES["x"]})) == {"true hashes"}


def test_file_never_sent_or_rejected_is_found() -> None:
    assert broken(*GOOD, download("x", 16, 17)) == {"only what was sent"}
    assert broken(*GOOD, upload("x", 16, 17, 401), download("x", 18, 19)) >= {"refused is not done"}


def test_a_file_that_is_seen_before_it_is_pushed_is_found() -> None:
    assert broken(*GOOD, upload("x", 20, 21), download("x", 16, 17)) >= {"real time"}


@pytest.mark.parametrize(
    "more",
    [
        [download("", 16, 17)],
        [download("a", 16, 17)],
        [unchanged("c", 16, 17)],
        [upload("x", 16, 17), download("d", 18, 19)],
        [upload("x", 16, 17, 503), download("x", 18, 19), download("d", 20, 21)],
        [upload("x", 5.5, 12), download("b", 13, 13.5)],
        [upload("x", 16, 17)],
    ],
)
def test_file_older_than_one_seen_before_is_found(more: Sequence[Operation]) -> None:
    assert broken(*GOOD, *more) == {"real time"}


def test_file_never_read_in_the_end_is_found() -> None:
    assert broken(*GOOD[:-1]) == {"read in the end"}


EVENTS = [event(at, FILE, HASHES[name]) for name, at in (("a", 2.5), ("c", 9.1), ("b", 9.2), ("d", 13))]


def test_of_each_file_a_follower_is_notified_in_any_possible_order() -> None:
    assert broken(*GOOD, follow(), *EVENTS) == set()
    assert broken(*GOOD, follow(), *EVENTS[:3]) == set(), "nobody knows that d was written"
    assert broken(*GOOD, follow(), *EVENTS, event(20, FILE, HASHES["a"])) == set(), "told again"


def test_file_without_an_event_is_found() -> None:
    for left_out in range(3):
        assert broken(*GOOD, follow(), *without(EVENTS, left_out)) == {"told of each write"}
    assert broken(*GOOD, follow(), *EVENTS, event(20, FILE, HASHES["x"])) == {"told of writes"}
    assert broken(*GOOD, follow(), *EVENTS[1:], event(0.7, FILE, HASHES["a"])) >= {"told of writes"}


def test_file_events_out_of_order_are_found() -> None:
    late = [*EVENTS[1:3], event(9.5, FILE, HASHES["a"]), EVENTS[3]]
    assert broken(*GOOD, follow(), *late) == {"told in order"}
    assert broken(*GOOD, follow(), *late[:2], reset(9.3), *late[2:]) == set()
