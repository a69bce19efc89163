"""The judge is not fooled about pages of changes: each broken promise, forged into a good history."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support import reference_append_log as twin

from proof import test_judge
from proof.history import END, Kind, Operation
from proof.test_judge import (
    DOCUMENT,
    FIRST_MS,
    GOOD_DOCUMENT,
    GOOD_LOG,
    LOG,
    SETUP,
    V1,
    V2,
    V3,
    Version,
    without,
)
from proof.test_judge_drafts import DRAFT, create, delete, hash_with
from proof.test_judge_files import FILE, HASHES, download, upload

Change = Mapping[str, Any]
REMEMBERS = replace(SETUP, sent={**SETUP.sent, "remembers": True})


def broken(*operations: Operation) -> set[str]:
    """The promises that the judge finds broken of a feed that remembers."""
    return test_judge.broken(REMEMBERS, *operations)


def change(key: str, hash_: str, ms: int = 1) -> Change:
    collection, id_ = key.split("/")
    return {"collection": collection, "params": {"id": id_}, "hash": hash_, "timestamp": ms}


def of_document(version: Version) -> Change:
    return change(DOCUMENT, version.hash)


def of_log(ids: str) -> Change:
    """That of a log with these ids."""
    return change(LOG, twin.log_hash(len(ids), {"id": ids[-1]}), FIRST_MS + len(ids))


def of_draft(id_: str) -> Change:
    return change(DRAFT, hash_with(id_))


REMOVED = {**change(DRAFT, ""), "removed": True}


def page(at: float, since: str, cursor: str, *changes: Change, more: bool = False) -> Operation:
    """A page that is asked for at one time, and answered half a second later. The cursors are of a folder
    where they have a place alone."""
    answer = {"changes": list(changes), "cursor": cursor} | ({"hasMore": True} if more else {})
    return _read("changes", at, {"since": since} if since else {}, answer)


def reset(at: float, since: str, cursor: str) -> Operation:
    return _read("changes", at, {"since": since} if since else {}, {"reset": True, "cursor": cursor})


def event(at: float, id_: str, told: Change) -> Operation:
    key = "/".join((told["collection"], *told["params"].values()))
    return replace(_read("event", at, {"id": id_}, told), key=key, status=None)


def stream_reset(at: float, id_: str) -> Operation:
    return replace(_read("reset", at, {"id": id_}, None), status=None)


def _read(kind: Kind, at: float, sent: dict[str, Any], answer: Any) -> Operation:
    return Operation(
        kind=kind, who="r1", node=0, sent=sent, start=at, end=at + 0.5, status=200, answer=answer
    )


GOOD_DRAFT = (create("x", 1, 2), delete("x", 10, 12), create("y", 15, 16), delete("y", 19, 20))
WRITTEN = (*GOOD_DOCUMENT, *GOOD_LOG, *GOOD_DRAFT)
READ = (
    page(5, "", "02~00-a~00-a", of_draft("x"), more=True),
    page(6, "02~00-a~00-a", "05-a", of_document(V1), of_log("ab")),
    page(6.6, "05-a", "05-a"),
    page(10, "05-a", "09-a", of_document(V2), of_log("abcd")),
    event(13, "10-a", REMOVED),
    event(17, "11-a", of_draft("y")),
    page(30, "11-a", "14-a~00-a~00-a", of_document(V3), REMOVED, more=True),
    page(31, "14-a~00-a~00-a", "16-a", of_log("abcdf")),
)
GOOD = (*WRITTEN, *READ)


def test_good_feed_passes() -> None:
    assert broken(*GOOD) == set()
    assert test_judge.broken(*GOOD) == set()
    assert broken(*WRITTEN, page(30, "now", "16-a"), page(32, "16-a", "16-a")) == set()


def test_change_that_no_page_has_is_found() -> None:
    for at, left_out in ((0, 0), (1, 0), (1, 1), (3, 0), (3, 1), (6, 1), (7, 0)):
        changes = without(READ[at].answer["changes"], left_out)
        less = replace(READ[at], answer={**READ[at].answer, "changes": changes})
        read = (*WRITTEN, *READ[:at], less, *READ[at + 1 :])
        assert broken(*read) == {"fed each write"}
        is_told_later = at < 6
        assert test_judge.broken(*read) == (set() if is_told_later else {"fed each write"})


def test_change_that_comes_after_the_reader_had_caught_up_is_found() -> None:
    late = page(6.6, "05-a", "06-a", of_log("ab"))
    read = (READ[0], page(6, "02~00-a~00-a", "05-a", of_document(V1)), late, *READ[3:])
    read = (*read[:3], page(10, "06-a", "09-a", of_document(V2), of_log("abcd")), *READ[4:])
    assert broken(*WRITTEN, *read) == {"fed each write"}
    assert test_judge.broken(*WRITTEN, *read) == set(), "in a bucket changes may come late"


def test_removal_or_creation_that_is_missed_between_pages_and_events_is_found() -> None:
    assert broken(*WRITTEN, *without(READ, 4)) == set(), "the removal of y came later"
    caught_up = page(14, "09-a", "09-a")
    assert broken(*WRITTEN, *READ[:4], caught_up, *READ[5:]) == {"fed each write"}
    assert broken(*WRITTEN, *without(READ, 5)) == set(), "y was removed"
    caught_up = page(18, "10-a", "10-a")
    assert broken(*WRITTEN, *READ[:5], caught_up, *READ[6:]) == {"fed each write"}


def test_page_from_before_a_write_does_not_tell_of_it() -> None:
    """The page overlaps the creation, and tells of the deletion before."""
    overlapping = page(14.7, "09-a", "10-a", REMOVED)
    missed = page(17, "10-a", "10-a")
    assert broken(*WRITTEN, *READ[:4], overlapping, *READ[5:]) == set()
    assert broken(*WRITTEN, *READ[:4], overlapping, missed, *READ[6:]) == {"fed each write"}


def test_either_of_two_uploads_at_once_may_be_the_last() -> None:
    together = upload("a", 1, 20), upload("b", 2, 10), download("b", 30, 31, END)
    for name in "ab":
        told = page(21, "", "02-a", change(FILE, HASHES[name]))
        assert broken(*together, told) == set()
    early = page(1.2, "", "01-a", change(FILE, HASHES["a"]))
    assert broken(*together, early, page(11, "01-a", "01-a")) == {"fed each write"}
    after = upload("c", 21, 22), download("c", 30, 31, END)
    assert broken(*together[:2], *after, page(23, "", "02-a", change(FILE, HASHES["b"]))) == {
        "fed each write"
    }


def test_document_that_is_told_twice_is_found() -> None:
    assert broken(*GOOD, page(33, "16-a", "17-a", of_document(V3))) == {"fed once"}
    assert broken(*GOOD, page(33, "16-a", "17-a", REMOVED)) == {"fed once"}
    assert broken(*GOOD, event(33, "17-a", of_log("abcdf")), page(34, "17-a", "17-a")) == {"fed once"}
    assert test_judge.broken(*GOOD, page(33, "16-a", "17-a", of_document(V3))) == set()
    assert "fed once" in test_judge.broken(*GOOD, page(33, "16-a", "18-a", of_document(V1), of_document(V3)))


def test_older_version_after_a_newer_one_is_found() -> None:
    skipping = page(6, "02~00-a~00-a", "05-a", of_log("ab"))
    late = page(33, "16-a", "17-a", of_document(V1))
    assert broken(*WRITTEN, READ[0], skipping, *READ[2:], late) == {"fed each write", "fed in order"}


@pytest.mark.parametrize("cursor", ["14-a~00-a~00-a", "14-a", "13-a", "02"])
def test_cursor_that_does_not_lead_on_is_found(cursor: str) -> None:
    last = page(31, "14-a~00-a~00-a", cursor, of_log("abcdf"))
    assert broken(*WRITTEN, *READ[:-1], last) == {"fed in order"}
    assert test_judge.broken(*WRITTEN, *READ[:-1], last) == {"fed in order"}


def test_cursor_of_an_empty_page_that_leads_back_is_found() -> None:
    assert broken(*GOOD, page(33, "16-a", "15-a")) == {"fed in order"}


@pytest.mark.parametrize("id_", ["09-a", "08-a"])
def test_event_from_before_the_page_is_found(id_: str) -> None:
    assert broken(*WRITTEN, *READ[:4], replace(READ[4], sent={"id": id_}), *READ[5:]) == {"fed in order"}


def test_event_at_the_place_of_an_unfinished_page_is_found() -> None:
    unfinished = page(6, "02~00-a~00-a", "05~00-a~00-a", of_document(V1), of_log("ab"), more=True)
    read = (READ[0], unfinished, event(7, "05-a", of_log("ab")), *READ[3:])
    assert broken(*WRITTEN, *read) == {"fed once", "fed in order"}


def test_reset_of_a_feed_that_remembers_is_found() -> None:
    read = (*READ[:3], reset(9, "05-a", "06-a"), page(31, "06-a", "06-a"))
    assert broken(*WRITTEN, *read) == {"fed each write", "fed from the oldest"}
    assert broken(*WRITTEN, reset(25, "", "16-a"), page(31, "16-a", "16-a")) == {"fed from the oldest"}


def test_a_reset_covers_what_was_asked_for_before_it() -> None:
    end = page(31, "06-a", "06-a")
    for moment, promises in ((25, set[str]()), (9, {"fed each write"})):
        assert test_judge.broken(*WRITTEN, *READ[:3], reset(moment, "05-a", "06-a"), end) == promises
        assert test_judge.broken(*WRITTEN, *READ[:3], stream_reset(moment, "06-a"), end) == promises
        assert broken(*WRITTEN, *READ[:3], stream_reset(moment, "06-a"), end) == promises
        assert broken(*WRITTEN, page(moment, "now", "06-a"), end) == promises


def test_reader_that_begins_anew_at_now_skips_what_was_written_before() -> None:
    assert broken(*WRITTEN, *READ[:3], page(30, "now", "16-a"), page(31, "16-a", "16-a")) == set()
    skipped = (*READ[:3], page(9.5, "now", "09-a"), page(31, "09-a", "09-a"))
    assert broken(*WRITTEN, *skipped) == {"fed each write"}


def test_reader_that_begins_anew_is_told_of_everything_again() -> None:
    everything = (of_document(V3), of_draft("z"), of_log("abcdf"))
    again = create("z", 35, 36)
    assert broken(*GOOD, again, page(40, "", "16-a", *everything)) == set()
    for left_out in range(3):
        rest = (*everything[:left_out], *everything[left_out + 1 :])
        assert broken(*GOOD, again, page(40, "", "16-a", *rest)) == {"fed each write"}


def test_reader_that_begins_anew_need_not_be_told_of_removals_from_before() -> None:
    everything = (of_document(V3), of_log("abcdf"))
    assert broken(*GOOD, page(40, "", "16-a", *everything)) == set()
    later = (create("z", 41, 42), delete("z", 43, 44), page(45, "16-a", "16-a"))
    assert broken(*GOOD, page(40, "", "16-a", *everything), *later) == {"fed each write"}
    told = (page(40, "", "15-a~16-a~16-a", *everything, of_draft("y"), more=True), page(41, "15-a", "16-a"))
    late = (*without(GOOD, GOOD.index(GOOD_DRAFT[-1])), replace(GOOD_DRAFT[-1], end=39.5))
    assert broken(*late, *told) == {"fed each write"}


def test_reader_that_does_not_catch_up_in_the_end_is_found() -> None:
    assert broken(*WRITTEN, *READ[:-1]) == {"read in the end"}
    assert broken(*GOOD, event(33, "17-a", of_document(V3))) == {"read in the end"}
    assert broken(*WRITTEN, replace(READ[0], status=503, answer=None)) == {"read in the end"}


def test_change_that_nobody_made_is_found() -> None:
    for told in (of_document(Version(9, "x")), change("counters/other", V1.hash), of_draft("z")):
        assert broken(*GOOD, page(33, "16-a", "17-a", told)) == {"told of writes"}
    early = page(0, "", "01-a", of_draft("x"))
    assert "told of writes" in broken(*WRITTEN, early, *READ)
    unfinished = of_document(Version(4, "z"))
    assert broken(*GOOD, page(33, "16-a", "17-a", unfinished)) == {"told of writes"}
    assert test_judge.broken(*GOOD, page(33, "16-a", "17-a", unfinished)) == set(), "in a bucket it may be"


def test_change_with_another_time_is_found() -> None:
    for at, told in enumerate((change(DOCUMENT, V1.hash, 2), change(LOG, of_log("ab")["hash"], 2))):
        changes = [*without(READ[1].answer["changes"], at), told]
        wrong = replace(READ[1], answer={**READ[1].answer, "changes": changes})
        assert broken(*WRITTEN, READ[0], wrong, *READ[2:]) == {"fed true times"}


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500])
def test_an_answer_that_no_reader_should_get_is_found(status: int) -> None:
    refused = replace(READ[0], status=status, answer=None, start=29, end=29.5)
    assert broken(*GOOD, refused) == {"only known answers"}
    assert broken(*GOOD, replace(refused, status=503)) == set()
