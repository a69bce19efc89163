"""The judge is not fooled about what followers are told: each broken promise, forged into a good history."""

from dataclasses import replace

import pytest
from support import reference_append_log as twin

from proof.follower import Block, blocks
from proof.history import Operation
from proof.test_judge import (
    DOCUMENT,
    FIRST_MS,
    GOOD_DOCUMENT,
    GOOD_LOG,
    LOG,
    NOTHING,
    V1,
    V2,
    V3,
    Version,
    append,
    broken,
    in_the_end,
    push,
    whole,
    without,
)

THERE = 0.5
"""When the follower of these histories was told its first place."""


def follow(opened: float | None = THERE, status: int | None = 200, who: str = "f1") -> Operation:
    sent = {} if opened is None else {"opened": opened}
    return Operation(kind="follow", who=who, node=0, sent=sent, start=0, end=99, status=status)


def event(at: float, key: str, hash_: str, id_: str = "", who: str = "f1") -> Operation:
    answer = {"hash": hash_, "timestamp": 1}
    return Operation(
        kind="event",
        who=who,
        node=0,
        key=key,
        sent={"id": id_ or f"{at:06.1f}"},
        start=at,
        end=at,
        answer=answer,
    )


def of_document(version: Version, at: float, id_: str = "") -> Operation:
    return event(at, DOCUMENT, version.hash, id_)


def of_log(ids: str, at: float, id_: str = "") -> Operation:
    """The change that left a log with these ids."""
    return event(at, LOG, twin.log_hash(len(ids), {"id": ids[-1]}), id_)


def reset(at: float) -> Operation:
    return Operation(kind="reset", who="f1", node=0, sent={"id": f"{at:06.1f}"}, start=at, end=at)


EVENTS = (
    of_document(V1, 3),
    of_log("a", 4),
    of_log("ab", 5),
    of_document(V2, 7),
    of_log("abc", 8),
    of_log("abcd", 9),
    of_document(V3, 20),
    of_log("abcdf", 24),
)
GOOD = (*GOOD_DOCUMENT, *GOOD_LOG, follow(), *EVENTS)


def test_a_good_history_passes() -> None:
    assert broken(*GOOD) == set()
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(None, 503)) == set(), "nobody was ever there"


def test_change_without_an_event_is_found() -> None:
    for left_out in (0, 1, 2, 3, 5, 7):
        delivered = without(EVENTS, left_out)
        assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *delivered) == {"told of each write"}
    # Whether these writes are made nobody knows.
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *without(EVENTS, 4, 6)) == set()


def test_follower_that_was_not_connected_yet_may_miss_an_event() -> None:
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(2.5), *EVENTS[4:]) == {"told of each write"}
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(2.5), *without(EVENTS, 0, 1, 2)) == set()
    assert broken(*GOOD, follow(0.5, who="f2")) == {"told of each write"}
    assert broken(*GOOD, follow(50, who="f2")) == set()


def test_a_reset_covers_what_was_written_before_it() -> None:
    missed = [one for one in EVENTS if not 5 < one.end < 10]
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *missed) == {"told of each write"}
    events = sorted([*missed, reset(10)], key=lambda one: one.end)
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *events) == set()
    events = sorted([*missed, reset(6.5)], key=lambda one: one.end)
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *events) == {"told of each write"}


def test_event_id_that_repeats_or_does_not_grow_is_found() -> None:
    assert broken(*GOOD, replace(EVENTS[-1], start=25, end=25)) == {"told once"}
    assert broken(*GOOD, of_log("abcdf", 25, "0001")) == {"told once"}
    # The same change under a new id is announced twice, which costs a pull.
    assert broken(*GOOD, of_log("abcdf", 25)) == set()
    other = [replace(one, who="f2") for one in (follow(), *EVENTS)]
    assert broken(*GOOD, *other) == set()


def test_event_that_nobody_wrote_is_found() -> None:
    assert broken(*GOOD, of_document(Version(9, "x"), 30)) == {"told of writes"}
    assert broken(*GOOD, of_log("abcdfg", 30)) == {"told of writes"}
    assert broken(*GOOD, event(30, "counters/other", V1.hash)) == {"told of writes"}


def test_a_change_that_was_rejected_is_found() -> None:
    assert broken(*GOOD, of_document(Version(1, "x"), 30)) == {"told of writes"}
    rejected = append("r", 30, 31, 401)
    assert broken(*GOOD, rejected, event(32, LOG, twin.log_hash(6, {"id": "r"}))) >= {"told of writes"}


def test_event_of_a_rejected_write_is_allowed_if_its_node_died_before_the_abort() -> None:
    rejected = push(V1, Version(2, "x"), 10, 11, 409, current=V2)
    events = of_document(Version(2, "x"), 30)
    stall = Operation(kind="stall", who="run", node=-1, start=10.5, end=13)
    kill = Operation(kind="kill", who="run", node=0, start=13, end=15)
    assert broken(*GOOD, rejected, stall, kill, events) == set()
    for others in (
        [kill],
        [stall],
        [stall, replace(kill, node=1)],
        [replace(stall, start=11.1), kill],
        [stall, replace(kill, start=9)],
    ):
        assert broken(*GOOD, rejected, *others, events) == {"told of writes"}


def test_event_of_a_write_that_may_have_succeeded_is_allowed() -> None:
    assert broken(*GOOD, of_document(Version(4, "z"), 30)) == set(), "a push that was answered 503"
    assert broken(*GOOD, event(30, LOG, twin.log_hash(6, {"id": "e"}))) == set(), "an append likewise"
    # An attempt at the append of f may have been announced at another place.
    assert broken(*GOOD, event(30, LOG, twin.log_hash(4, {"id": "f"}))) == set()


def test_event_before_its_write_is_found() -> None:
    early = [of_document(V1, 1.5), *without(EVENTS, 0)]
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *early) == {"told of writes", "told of each write"}
    early = [of_log("a", 0.9), *without(EVENTS, 1)]
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *early) == {"told of writes", "told of each write"}


def test_changes_of_one_document_out_of_order_are_found() -> None:
    swapped = [of_document(V1, 7.1), of_document(V2, 7)]
    events = sorted([*without(EVENTS, 0, 3), *swapped], key=lambda one: one.end)
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *events) == {"told in order"}
    swapped = [of_log("ab", 6), of_log("a", 6.1)]
    events = sorted([*without(EVENTS, 1, 2), *swapped], key=lambda one: one.end)
    assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *events) == {"told in order"}


def test_event_of_a_write_before_a_reset_may_be_late() -> None:
    late = [*without(EVENTS, 0, 3), of_document(V2, 7.5), of_document(V1, 8.5)]
    for moment, promises in ((1, {"told in order"}), (7.8, set[str]())):
        events = sorted([*late, reset(moment)], key=lambda one: one.end)
        assert broken(*GOOD_DOCUMENT, *GOOD_LOG, follow(), *events) == promises


def test_repeated_change_event_is_in_order() -> None:
    assert broken(*GOOD, of_document(V1, 30), of_log("a", 31)) == set()


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500])
def test_an_answer_that_no_follower_should_get_is_found(status: int) -> None:
    assert broken(*GOOD, follow(None, status)) == {"only known answers"}


def test_the_first_attempt_of_a_repeated_write_begins_it() -> None:
    tries = [push(NOTHING, V1, 1, 5, None, once="k"), push(NOTHING, V1, 10, 11, once="k"), in_the_end(V1)]
    assert broken(*tries, follow(), of_document(V1, 2)) == set()
    assert broken(*tries, follow(), of_document(V1, 0.7)) == {"told of writes", "told of each write"}
    assert broken(*tries, follow()) == {"told of each write"}
    tries = [append("a", 1, 5, None, once="k"), append("a", 10, 11, position=1, once="k"), whole("a")]
    assert broken(*tries, follow(), of_log("a", 2)) == set()
    assert broken(*tries, follow()) == {"told of each write"}
    assert tries[1].answer["timestamp"] == FIRST_MS + 1


async def test_stream_is_read_in_chunks_of_any_size() -> None:
    text = b': hello\n\nid: 1\n\nid: 2\ndata: {"a":\ndata: 1}\n\n:\n\nevent: reset\nid: 3\ndata: {}\n\n'
    text += b"id: 9\ndat"
    for size in (1, 2, 3, 7, 100):

        async def chunks(size: int = size):  # type: ignore[no-untyped-def]
            for at in range(0, len(text), size):
                yield text[at : at + size]

        events = [block async for block in blocks(chunks(), "0")]
        assert events == [
            Block("", b"", "0"),
            Block("", b"", "1"),
            Block("", b'{"a":1}', "2"),
            Block("", b"", "2"),
            Block("reset", b"{}", "3"),
        ]
