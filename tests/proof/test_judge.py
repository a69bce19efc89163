"""The judge is not fooled: each way to break a promise, forged into a history that is otherwise good."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import reference_append_log as twin

from proof.documents import hash_of
from proof.history import END, History, Kind, Operation, numbered, read
from proof.judge import judge, judge_operations
from proof.verdict import Violation

DOCUMENT, LOG, DOOR = "counters/a", "logs/a", "metered/door"
FIRST_MS = 1_000
NUMBERS = itertools.count()
ERROR = {"error": "no", "code": "no"}
SETUP = Operation(
    kind="setup",
    who="run",
    node=-1,
    sent={"limit": {"window_ms": 1000, "max_requests": 2}},
    start=0,
    end=0,
)


def violations(*operations: Operation) -> list[Violation]:
    return judge_operations(numbered([SETUP, *operations])).violations


def broken(*operations: Operation) -> set[str]:
    """The promises that the judge finds broken."""
    return {violation.promise for violation in violations(*operations)}


class Version:
    """What a document holds: the number `n`, and whose write it is."""

    def __init__(self, n: int, by: str = "") -> None:
        self.data = ({"n": n} | ({"by": by} if by else {})) if n else {}
        self.hash = hash_of(self.data) if n else ""


NOTHING = Version(0)


def operation(
    kind: Kind,
    key: str,
    sent: dict[str, Any],
    start: float,
    end: float,
    status: int | None,
    answer: Any = None,
    *,
    who: str = "c1",
    nonce: str | None = None,
) -> Operation:
    rejected = ERROR if status is not None and status >= 400 else None
    return Operation(
        kind=kind,
        who=who,
        node=0,
        key=key,
        sent=sent,
        start=start,
        end=end,
        status=status,
        answer=answer or rejected,
        nonce=f"nonce {next(NUMBERS)}" if nonce is None else nonce,
    )


def push(
    base: Version,
    version: Version,
    start: float,
    end: float,
    status: int | None = 200,
    *,
    current: Version = NOTHING,
    once: str = "",
) -> Operation:
    """`current` is what a 409 tells of."""
    answers = {200: {"hash": version.hash, "timestamp": 1}, 409: {**ERROR, "currentHash": current.hash}}
    sent = {"data": version.data, "base": base.hash} | ({"once": once} if once else {})
    return operation("push", DOCUMENT, sent, start, end, status, answers.get(status or 0))


def pull(version: Version, start: float, end: float, who: str = "c2") -> Operation:
    answer = {"data": version.data, "hash": version.hash, "timestamp": 1}
    return operation("pull", DOCUMENT, {}, start, end, 200, answer, who=who)


def pull_304(version: Version, start: float, end: float) -> Operation:
    return operation("pull", DOCUMENT, {"known": version.hash}, start, end, 304)


def in_the_end(version: Version) -> Operation:
    return pull(version, 100, 101, END)


def append(
    id_: str, start: float, end: float, status: int | None = 200, *, position: int = 0, once: str = ""
) -> Operation:
    """`place` is what a 200 tells, counted from 1."""
    answer = {"hash": twin.log_hash(position, {"id": id_}), "timestamp": FIRST_MS + position}
    sent = {"data": {"id": id_}} | ({"once": once} if once else {})
    return operation("append", LOG, sent, start, end, status, answer if status == 200 else None)


def items(ids: str) -> list[dict[str, Any]]:
    """The elements of a log with these ids."""
    return [{"ts": FIRST_MS + position, "data": {"id": id_}} for position, id_ in enumerate(ids, start=1)]


def tail(
    ids: str, start: float, end: float, who: str = "c2", shown: str | None = None, **sent: Any
) -> Operation:
    """The answer of a log with these ids, of which those `shown` are within the bounds."""
    elements = items(ids)
    within = [element for element in elements if shown is None or element["data"]["id"] in shown]
    hash_ = twin.log_hash(len(elements), elements[-1]["data"]) if elements else ""
    answer = {"data": {"items": within} if elements else {}, "hash": hash_, "timestamp": 1}
    return operation("tail", LOG, sent, start, end, 200, answer, who=who)


def whole(ids: str) -> Operation:
    return tail(ids, 100, 101, END, full="true")


def knock(from_ms: int, to_ms: int, status: int = 200) -> Operation:
    sent = {"from_ms": from_ms, "to_ms": to_ms}
    return operation("metered", DOOR, sent, from_ms / 1000, to_ms / 1000, status)


def replay(of: Operation, status: int | None = 401, after: float = 10) -> Operation:
    sent = {"kind": of.kind}
    return operation("replay", of.key, sent, of.end + after, of.end + after + 1, status, nonce=of.nonce)


V1, V2, V3 = Version(1, "a"), Version(2, "b"), Version(3, "c")
GOOD_DOCUMENT = (
    pull(NOTHING, 0, 1),
    push(NOTHING, V1, 2, 4),
    push(NOTHING, Version(1, "x"), 3, 5, 409, current=V1),
    pull(V1, 4, 9),
    push(V1, V2, 6, 7),
    pull(V2, 8, 9),
    pull_304(V2, 10, 11),
    push(V2, V3, 12, 22, None),
    pull(V2, 13, 14),
    pull(V3, 15, 16),
    push(V2, Version(3, "y"), 16, 17, 409, current=V3),
    push(V3, Version(4, "z"), 18, 28, 503),
    in_the_end(V3),
)
GOOD_LOG = (
    tail("", 0, 1, last=5),
    append("a", 1, 3, position=1),
    append("b", 2, 5, position=2),
    tail("a", 3, 4, last=5),
    append("c", 6, 16, None),
    append("d", 8, 9, position=4),
    tail("abcd", 10, 11, shown="cd", last=2),
    tail("abcd", 10, 11, shown="d", checkpoint=FIRST_MS + 3),
    tail("abcd", 10, 11, shown="d", checkpoint=FIRST_MS + 1, last=1),
    tail("abcd", 10, 11, shown="", last=0),
    append("e", 12, 22, 503),
    append("f", 12, 22, None, once="f"),
    append("f", 23, 24, position=5, once="f"),
    append("f", 25, 26, position=5, once="f"),
    whole("abcdf"),
)


def test_good_histories_pass() -> None:
    assert violations(*GOOD_DOCUMENT) == []
    assert violations(*GOOD_LOG) == []
    assert (
        violations(*GOOD_LOG, *GOOD_DOCUMENT, knock(0, 10), replay(GOOD_LOG[1]), replay(GOOD_LOG[0], 503))
        == []
    )


def without(operations: Sequence[Operation], *left_out: int) -> list[Operation]:
    return [operation for at, operation in enumerate(operations) if at not in left_out]


def test_a_lost_increment_is_found() -> None:
    once_more = push(V1, Version(2, "lost"), 30, 31)
    assert "nothing lost" in broken(*GOOD_DOCUMENT, once_more)
    plain = [push(Version(n), Version(n + 1), 10 * n, 10 * n + 1) for n in range(4)]
    assert broken(*plain, in_the_end(Version(4))) == set()
    assert {"counted increments", "nothing lost"} <= broken(*plain, in_the_end(Version(3)))


def test_an_increment_that_nobody_made_is_found() -> None:
    assert "only what was sent" in broken(*without(GOOD_DOCUMENT, 4))
    skipped = [push(NOTHING, V1, 0, 1), push(V1, V3, 2, 3), in_the_end(V3)]
    assert broken(*skipped) == {"counted increments"}


def test_two_winners_for_one_base_are_found() -> None:
    assert "one winner" in broken(*GOOD_DOCUMENT, push(V1, Version(2, "lost"), 6, 8))
    # The same bytes: what is stored does not tell that there were two.
    plain = [push(NOTHING, Version(1), 0, 5), push(NOTHING, Version(1), 1, 6), in_the_end(Version(1))]
    assert broken(*plain) == {"one winner", "counted increments"}
    assert broken(replace(plain[0], status=None), *plain[1:]) == set()


def test_a_push_that_is_repeated_under_its_key_is_one() -> None:
    twice = [push(NOTHING, V1, 0, 9, None, once="k"), push(NOTHING, V1, 10, 11, once="k")]
    assert broken(*twice, push(NOTHING, V1, 12, 13, once="k"), in_the_end(V1)) == set()
    assert "one winner" in broken(*twice, push(NOTHING, V1, 12, 13, once="other"), in_the_end(V1))


def test_a_repeated_push_that_conflicts_with_itself_is_found() -> None:
    first = push(NOTHING, V1, 0, 9, None, once="k")
    itself = push(NOTHING, V1, 10, 11, 409, current=V1, once="k")
    assert broken(first, itself, in_the_end(V1)) == {"true conflicts"}
    plain = Version(1)
    tries = [replace(one, sent={**one.sent, "data": plain.data}) for one in (first, itself)]
    tries[1] = replace(tries[1], answer={"currentHash": plain.hash})
    assert broken(*tries, push(NOTHING, plain, 1, 2), in_the_end(plain)) == set(), "another's may be there"


@pytest.mark.parametrize("is_stored", [False, True])
def test_repetition_of_unknown_outcome_may_have_been_written_or_not(is_stored: bool) -> None:
    unknown = push(NOTHING, V1, 10, 11, 409, once="k")
    unknown = replace(unknown, answer={**ERROR, "code": "outcome_unknown"})
    stored = V1 if is_stored else NOTHING
    assert broken(push(NOTHING, V1, 0, 9, None, once="k"), unknown, in_the_end(stored)) == set()


def test_repeated_push_with_another_time_is_found() -> None:
    once = push(NOTHING, V1, 0, 1, once="k")
    later = replace(once, start=2, end=3, nonce="later", answer={**once.answer, "timestamp": 2})
    assert broken(once, later, in_the_end(V1)) == {"true answers"}


def test_a_conflict_that_was_written_is_found() -> None:
    rejected = replace(GOOD_DOCUMENT[4], status=409, answer={"currentHash": NOTHING.hash})
    assert "refused is not done" in broken(*without(GOOD_DOCUMENT, 4), rejected)
    plain = [push(NOTHING, Version(1), 0, 1), push(Version(1), Version(2), 2, 3, 409, current=V1)]
    assert {"refused is not done", "counted increments"} <= broken(*plain, in_the_end(Version(2)))


def test_a_conflict_with_the_current_version_is_found() -> None:
    assert broken(*GOOD_DOCUMENT, push(V3, Version(4, "x"), 30, 31, 409, current=V3)) == {"true conflicts"}


def test_a_stale_pull_is_found() -> None:
    assert broken(*GOOD_DOCUMENT, pull(V1, 7.5, 7.6)) == {"real time"}
    assert broken(*GOOD_DOCUMENT, pull_304(V1, 7.5, 7.6)) == {"real time"}
    assert broken(*GOOD_DOCUMENT, push(V1, Version(2, "x"), 8, 9, 409, current=V1)) >= {"real time"}
    # Nobody acknowledged V3, but somebody has seen it.
    assert broken(*GOOD_DOCUMENT, pull(V2, 16.5, 17)) == {"real time"}


def test_a_pull_of_what_was_not_sent_yet_is_found() -> None:
    assert broken(*GOOD_DOCUMENT, pull(V2, 4.5, 5)) == {"real time"}


def test_a_pull_of_what_was_never_written_is_found() -> None:
    assert broken(*GOOD_DOCUMENT, pull(Version(1, "x"), 5, 6)) == {"only what was written"}
    torn = replace(GOOD_DOCUMENT[5], answer={"data": V1.data, "hash": V2.hash, "timestamp": 1})
    assert broken(*without(GOOD_DOCUMENT, 5), torn) == {"true hashes"}
    assert "true hashes" in broken(
        *without(GOOD_DOCUMENT, 4), replace(GOOD_DOCUMENT[4], answer={"hash": V1.hash})
    )


def test_document_never_read_in_the_end_is_not_proved() -> None:
    assert broken(*GOOD_DOCUMENT[:-1]) == broken(*GOOD_LOG[:-1]) == {"read in the end"}


def test_a_lost_append_is_found() -> None:
    assert broken(*GOOD_LOG, append("g", 30, 31, position=6)) == {"nothing lost"}
    assert "nothing lost" in broken(*GOOD_LOG[:-1], whole("abcd"))


def test_a_doubled_append_is_found() -> None:
    twice = [append("a", 0, 10, position=1), append("b", 11, 12, position=3)]
    assert broken(*twice, whole("aab")) == {"once"}
    unknown = [append("a", 0, 10, None), append("b", 11, 12, position=3)]
    assert broken(*unknown, whole("aab")) == {"once"}
    keyed = [append("a", 0, 10, None, once="k"), append("a", 11, 12, position=2, once="k")]
    assert broken(*keyed, whole("aa")) == {"once", "true answers"}


def test_a_rejected_append_that_is_there_is_found() -> None:
    assert broken(append("a", 0, 1, 401, position=1), whole("a")) >= {"refused is not done"}


def test_an_element_that_nobody_sent_is_found() -> None:
    assert broken(append("a", 0, 1, position=1), whole("ax")) == {"only what was sent"}
    changed = replace(append("a", 0, 1, position=1), sent={"data": {"id": "a", "pad": "..."}})
    assert broken(changed, whole("a")) == {"only what was sent"}


def test_a_repetition_that_is_answered_otherwise_is_found() -> None:
    assert broken(*GOOD_LOG, append("f", 27, 28, position=4, once="f")) == {"true answers"}
    late = replace(GOOD_LOG[1], answer={**GOOD_LOG[1].answer, "timestamp": FIRST_MS})
    assert broken(*without(GOOD_LOG, 1), late) == {"true answers"}


def test_elements_out_of_order_are_found() -> None:
    reordered = [append("a", 0, 1, position=2), append("b", 2, 3, position=1), whole("ba")]
    assert broken(*reordered) == {"real time"}
    assert broken(replace(reordered[0], end=2.5), *reordered[1:]) == set()
    same_time = whole("ab")
    same_time.answer["data"]["items"][1]["ts"] = FIRST_MS + 1
    assert "later times" in broken(append("a", 0, 1, position=1), append("b", 2, 9, None), same_time)


def test_a_stale_tail_is_found() -> None:
    assert broken(*GOOD_LOG, tail("ab", 9.5, 10, last=9)) == {"real time"}
    # Nobody acknowledged c, but somebody has seen it.
    unseen = tail("abcd", 6.5, 7, last=9), tail("abc", 7, 8, last=9)
    assert broken(*GOOD_LOG, unseen[1], tail("ab", 8.5, 9, last=9)) == {"real time"}
    assert broken(*GOOD_LOG, unseen[0]) == {"real time"}


def test_a_tail_of_other_elements_is_found() -> None:
    for shown in ("", "c", "d", "abcd"):
        assert broken(*GOOD_LOG, tail("abcd", 10, 11, shown=shown, last=2)) == {"true tails"}
    assert broken(*GOOD_LOG, tail("abcd", 10, 11, shown="cd", checkpoint=FIRST_MS + 3)) == {"true tails"}
    assert broken(*GOOD_LOG, tail("abx", 10, 11, last=9)) == {"only what was written"}


@pytest.mark.parametrize("status", [200, 304, 409, 404])
def test_a_replay_that_is_accepted_is_found(status: int) -> None:
    first = GOOD_LOG[1]
    assert broken(*GOOD_LOG, replay(first), replay(first, status, 20)) == {"no replay"}
    twice_at_once = [replace(operation, nonce="same") for operation in (GOOD_LOG[3], GOOD_LOG[0])]
    assert broken(*without(GOOD_LOG, 0, 3), *twice_at_once) == {"no replay"}


def test_a_replay_that_nobody_answers_is_none() -> None:
    assert broken(*GOOD_LOG, replay(GOOD_LOG[1], None), replay(GOOD_LOG[1], 503)) == set()


def test_a_fresh_request_that_is_rejected_as_a_replay_is_found() -> None:
    rejected = operation("pull", DOCUMENT, {}, 5, 6, 401)
    assert broken(*GOOD_DOCUMENT, rejected) == {"fresh requests"}
    assert broken(*GOOD_DOCUMENT, rejected, replace(rejected, status=None, answer=None)) == set()


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500])
def test_an_answer_that_nobody_should_get_is_found(status: int) -> None:
    kinds: tuple[Kind, ...] = ("pull", "push")
    for kind in kinds:
        odd = operation(kind, DOCUMENT, {"data": {}, "base": ""}, 5, 6, status)
        assert broken(*GOOD_DOCUMENT, odd) == {"only known answers"}


def test_more_requests_than_a_window_holds_are_found() -> None:
    held = [knock(1000, 1100), knock(1500, 1999), knock(1600, 1700, 429)]
    assert broken(*held) == set()
    assert broken(*held, knock(1998, 2001)) == set()
    assert broken(*held, knock(1100, 1998)) == {"limits hold"}
    # One of four may have been counted in the next window, but not two.
    assert broken(*held, knock(1998, 2001), knock(1999, 2001), knock(2500, 2600)) == {"limits hold"}


def test_a_violation_names_the_lines_that_show_it(tmp_path: Path) -> None:
    stale = pull(V1, 7.5, 7.6)
    with History(tmp_path / "history") as history:
        for operation in (SETUP, *GOOD_DOCUMENT, stale):
            history.add(operation)
    assert read(history.path) == [SETUP, *GOOD_DOCUMENT, stale]
    verdict = judge(history.path)
    assert [found.operations[-1] for found in verdict.violations] == [stale]
    assert re.findall(r"line (\d+): ", str(verdict)) == ["6", str(len(GOOD_DOCUMENT) + 2)]
    assert "real time (1)" in str(verdict)
    assert verdict.counts["pull 200"] == 7
