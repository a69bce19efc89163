"""Batches are planned as the twin plans them, and answered as single pulls are."""

import json
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference
from support.depth import depth

import pysync._core as core
from pysync.errors import (
    BatchAppendBudgetExceeded,
    BatchKeyDenied,
    DocumentCorrupt,
    InvalidKnown,
    InvalidParams,
    MissingCollections,
    PysyncError,
)

ROWS: list[reference.BatchRow] = [
    ("notes", "notes/{id}", True, False, None, [], None),
    ("mine", "users/{identity}/{id}", True, True, None, [], None),
    ("rooms", "{room}/x/{id}", True, True, 1000, ["room"], None),
    ("files", "files/{id}", False, True, None, [], None),
    ("log", "log/{id}", True, True, None, [], 0),
    ("short", "users/{identity}/log/{id}", True, True, 1000, [], 7),
]
LIMITS = (5, 2000, ["_keyring", "_members"])
PLANNER = core.BatchPlanner(ROWS, *LIMITS)

values = st.sampled_from(
    ["a", "b.c", "", ".", "..", "a/b", "a\n", "é", "%61", "_pysync", "x_keyring", "_keyring", "a..b",
     "a" * 255, "a" * 256, 7, -1, 2**63, 2**64, 1.5, -0.0, 1e21, True, None, ["a"]]
)  # fmt: skip
param_sets = st.dictionaries(st.sampled_from(["id", "identity", "room", "other"]), values, max_size=3)
names = st.sampled_from(
    ["notes", "mine", "rooms", "files", "log", "short", "gone", "", "a_members", "_members"]
)
bounds = st.none() | st.dictionaries(
    st.sampled_from(["since", "last", "limit", "full", "field"]),
    st.sampled_from([0, 3, 7, 8, 900, 1000, 2**63, 2**64 - 1, 2**64, -1, 1.5, "1"]),
    max_size=3,
)
versions = st.sampled_from(["0123456789abcdef"] * 9 + ["f" * 16, None, "", "F" * 16, "f" * 15, "f" * 17, 1])


def query_of(collections: str, **members: object) -> str:
    return urlencode({"collections": collections} | {name: json.dumps(v) for name, v in members.items()})


def entries(query: str, identity: str, paths: list[str]) -> dict[str, list[tuple[str, str]]]:
    """What the core plans, told by answering each read with its own key, bounds and known version."""
    plan = PLANNER.plan(query.encode(), identity, core.Scope(paths, identity))
    tails: list[tuple[str, bytes, bool] | str] = [
        f"tail:{key} {since} {newest} {oldest}" for key, _, since, newest, oldest in plan.tails
    ]
    unchanged = {at: f"{digits}:{plan.reads[at][0]}" for at, (digits, _) in plan.known.items()}
    stored = [f"read:{key}" for key, _ in plan.reads]
    body = plan.answer(stored, 0, tails=tails, unchanged=unchanged).body()

    def parsed(text: str) -> tuple[str, str]:
        kind, colon, rest = text.partition(":")
        return (kind, rest) if colon else ("error", text)

    return {
        name: [parsed(entry["error"]) if "error" in entry else ("known", entry["hash"]) for entry in answers]
        for name, answers in json.loads(body)["collections"].items()
    }


def outcome(plan: Any, *args: Any) -> object:
    try:
        return plan(*args)
    except PysyncError as error:
        return type(error)


@pytest.mark.slow
@settings(max_examples=depth(375, 6000), deadline=None)
@given(
    st.lists(names, max_size=4).map(",".join),
    st.dictionaries(names, st.lists(param_sets, max_size=3), max_size=3),
    st.dictionaries(names, st.lists(bounds, max_size=2), max_size=2),
    st.dictionaries(names, st.lists(versions, min_size=1, max_size=2), max_size=2),
    st.sampled_from(["", "ab"]),
    st.sampled_from([[], ["users/ab/**"], ["**", "!b.c/**"]]),
)
def test_a_batch_is_planned_as_the_twin_plans_it(
    collections: str, params: Any, append: Any, known: Any, identity: str, paths: list[str]
) -> None:
    query = query_of(collections, params=params, appendParams=append, known=known)
    expected = outcome(reference.batch_entries, ROWS, LIMITS, query, identity, paths)
    assert outcome(entries, query, identity, paths) == expected


@settings(max_examples=depth(125, 2000), deadline=None)
@given(st.text('ab+ %4&=,;é"{}[]:', max_size=20), st.text("ab+ %41&=;", max_size=12))
def test_queries_are_decoded_as_forms(text: str, raw: str) -> None:
    for query in (
        f"collections=n{quote(text)}",
        f"collections=n{quote_plus(text)}",
        f"{raw}&collections=n{raw}",
    ):
        assert outcome(entries, query, "", []) == outcome(
            reference.batch_entries, ROWS, LIMITS, query, "", []
        )


@pytest.mark.parametrize(
    "params", ["{", "[]", "null", "1", "{}x", "[" * 200, '{"notes":{}}', '{"notes":[1]}', '{"notes":[null]}',
               '{"notes":[{"id":"\\ud800"}]}', '{"notes":[{"id":NaN}]}', '{"notes":[{"id":null}]}']
)  # fmt: skip
def test_malformed_params_are_rejected(params: str) -> None:
    with pytest.raises(InvalidParams):
        PLANNER.plan(f"collections=notes&params={quote(params)}".encode(), "")


@pytest.mark.parametrize(
    "known", ["{", "[]", "null", '{"notes":{}}', '{"notes":[]}', '{"notes":[null,null]}', '{"notes":[0]}',
              '{"notes":["cbbb"]}', '{"notes":["0123456789abcdeF"]}', '{"other":["0123456789abcdex"]}',
              '{"notes":["\\ud800"]}', '{"notes":["%s"]}' % ("0" * 64)]
)  # fmt: skip
def test_malformed_known_versions_are_rejected(known: str) -> None:
    with pytest.raises(InvalidKnown):
        PLANNER.plan(f"collections=notes&known={quote(known)}".encode(), "")


def test_document_is_read_once_for_each_version_that_the_client_has() -> None:
    sets = [{"room": "r", "id": name} for name in "aaabb"]
    known = ["0" * 16, "1" * 16, "0" * 16, None, "0" * 16]
    plan = PLANNER.plan(query_of("rooms", params={"rooms": sets}, known={"rooms": known}).encode(), "")
    assert [key for key, _ in plan.reads] == ["r/x/a", "r/x/a", "r/x/b", "r/x/b"]
    assert plan.known == {0: ("0" * 16, 1000), 1: ("1" * 16, 1000), 3: ("0" * 16, 1000)}
    assert plan.times[0] == [2, 1, 1, 1]
    hash_ = "0" * 64
    body = plan.answer(["A", "B", "C", "D"], 7, unchanged={0: hash_}).body()
    same = {"unchanged": True, "hash": hash_, "timestamp": 7}
    shown = [same, {"error": "B"}, same, {"error": "C"}, {"error": "D"}]
    assert json.loads(body)["collections"]["rooms"] == shown
    with pytest.raises(ValueError, match="no such read"):
        plan.answer(["A", "B", "C", "D"], 7, unchanged={4: hash_})


def test_the_etag_tells_an_unchanged_document_from_one_that_is_sent() -> None:
    query = query_of("notes", params={"notes": [{"id": "a"}]}, known={"notes": ["0" * 16]})
    plan = PLANNER.plan(query.encode(), "")
    found = stored({"n": 1})
    hash_ = core.read_document(found).hash
    etags = [plan.answer([found], at, unchanged=same).etag for at in (0, 7) for same in ({}, {0: hash_})]
    assert etags[0] != etags[1] == etags[3]
    assert etags[0] == etags[2]


def test_the_first_of_repeated_parameters_counts() -> None:
    assert list(entries("collections=gone&collections=notes", "", [])) == ["gone"]
    with pytest.raises(MissingCollections):
        PLANNER.plan(b"collections=&collections=notes", "")


def test_keys_that_were_encoded_are_denied_as_they_are_read() -> None:
    for text in ("_keyring", "%5Fkeyring", "%5f%6b%65yring"):
        query = f'collections=notes&params={{"notes":[{{"id":"{text}"}}]}}'
        with pytest.raises(BatchKeyDenied):
            PLANNER.plan(query.encode(), "")


def test_document_requested_twice_is_read_once() -> None:
    sets = [{"id": "a"}, {"id": "b"}, {"id": "a"}]
    plan = PLANNER.plan(query_of("notes", params={"notes": sets}).encode(), "")
    assert plan.reads == [("notes/a", 0), ("notes/b", 0)]
    assert json.loads(plan.answer(["A", "B"], 0).body())["collections"]["notes"] == [
        {"error": "A"}, {"error": "B"}, {"error": "A"}
    ]  # fmt: skip


def test_entries_are_grouped_by_what_decides_on_them() -> None:
    mine = [{"identity": "x", "id": "1"}, {"id": "2"}, {"identity": "x", "id": "3"}]
    rooms = [{"room": "r", "id": "1"}, {"room": "s", "id": "1"}]
    planner = core.BatchPlanner(ROWS, 7, 0, [])
    plan = planner.plan(
        query_of("rooms,mine,gone,files", params={"mine": mine, "rooms": rooms}).encode(), "me"
    )
    assert plan.collections == [2, 1]
    assert plan.groups == [(2, None, ["r"]), (2, None, ["s"]), (1, "x", []), (1, "me", [])]
    assert [group for _, group in plan.reads] == [0, 1, 2, 3, 2]


def stored(data: object, ts_ms: int = 5, author: bool = False) -> bytes:
    body: dict[str, object] = {"data": data}
    if author:
        body |= {"authorPubkey": 'k"ey', "authorSignature": "sig"}
    return core.decode_push(json.dumps(body).encode()).stored(ts_ms)


documents = st.builds(
    stored,
    st.dictionaries(
        st.text(max_size=3),
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        max_size=3,
    ),
    st.integers(0, 3000),
    st.booleans(),
)
starfish = st.just(b'{"data":{"b":1},"v":1,"hash":"abcd","ts":2500}')
outcomes = st.none() | documents | starfish | st.sampled_from([b"", b"{", b'{"v":1}', "store_unavailable"])


def single(found: bytes | str | None, now_ms: int, ttl_ms: int | None) -> bytes:
    """The entry, made of what a single pull answers."""
    missing = b'{"data":{},"hash":"","timestamp":%d}' % now_ms
    if found is None:
        return missing
    if isinstance(found, str):
        return json.dumps({"error": found}, separators=(",", ":")).encode()
    try:
        document = core.read_document(found)
    except DocumentCorrupt:
        return b'{"error":"document_corrupt"}'
    expired = ttl_ms is not None and document.ts_ms + ttl_ms < now_ms
    return missing if expired else document.answer(now_ms)


@settings(max_examples=depth(125, 2000), deadline=None)
@given(outcomes, outcomes, outcomes, st.integers(0, 4000))
def test_entries_are_what_single_pulls_answer(first: Any, second: Any, third: Any, now_ms: int) -> None:
    params = {"notes": [{"id": "a"}, {"id": "b"}, {"id": "a"}], "rooms": [{"room": "r", "id": 1}]}
    plan = PLANNER.plan(query_of("notes,rooms", params=params).encode(), "")
    answer = plan.answer([first, second, third], now_ms)
    one, two, three = single(first, now_ms, None), single(second, now_ms, None), single(third, now_ms, 1000)
    assert answer.body() == b'{"collections":{"notes":[%b,%b,%b],"rooms":[%b]}}' % (one, two, one, three)
    assert answer.failed == any(entry.startswith(b'{"error"') for entry in (one, two, three))


@pytest.mark.slow
@settings(max_examples=depth(75, 1200), deadline=None)
@given(st.lists(outcomes, min_size=2, max_size=2), st.lists(outcomes, min_size=2, max_size=2))
def test_the_etag_depends_on_hashes_and_errors_and_nothing_else(first: list[Any], second: list[Any]) -> None:
    plan = PLANNER.plan(query_of("notes", params={"notes": [{"id": "a"}, {"id": "b"}]}).encode(), "")

    def shown(outcomes: list[Any]) -> list[object]:
        entries = [json.loads(single(found, 0, None)) for found in outcomes]
        return [(entry.get("hash"), entry.get("error")) for entry in entries]

    etags = plan.answer(first, 0).etag, plan.answer(second, 9).etag
    assert (etags[0] == etags[1]) == (shown(first) == shown(second))


def test_the_etag_depends_on_keys_and_variants() -> None:
    plans = [PLANNER.plan(query_of("notes", params={"notes": [{"id": n}]}).encode(), "") for n in ("a", "b")]
    etags = {plan.answer([None], 0, variant).etag for plan in plans for variant in (None, b"x", b"y")}
    assert len(etags) == 6
    assert plans[0].answer([None], 0).etag == plans[0].answer([None], 7, b"").etag


def tailing(bounds: list[object], ids: list[str] | None = None) -> str:
    """A query for the log `a`, or those of `ids`, once for each of `bounds`."""
    sets = [{"id": name} for name in ids or ["a"] * len(bounds)]
    return query_of("log", params={"log": sets}, appendParams={"log": bounds})


def test_a_log_is_read_once_for_each_of_its_bounds() -> None:
    named = [{"last": 3}, {"since": 5}, {"limit": 3, "last": 9}, {"since": 5, "last": 3}, {"last": 3, "x": 1}]
    plan = core.BatchPlanner(ROWS, 9, 5000, []).plan(tailing([*named]).encode(), "")
    assert plan.reads == []
    assert plan.tails == [("log/a", 0, None, 3, None), ("log/a", 0, 5, None, 1000), ("log/a", 0, 5, 3, None)]
    tails: list[tuple[str, bytes, bool] | str] = [
        ("h", b'{"items":[1]}', True),
        "store_unavailable",
        ('"', b'{"items":[]}', False),
    ]
    answer = plan.answer([], 7, tails=tails)
    first = b'{"data":{"items":[1]},"hash":"h","timestamp":7,"hasMore":true}'
    failed = b'{"error":"store_unavailable"}'
    third = b'{"data":{"items":[]},"hash":"\\"","timestamp":7}'
    entries = (first, failed, first, third, first)
    assert answer.body() == b'{"collections":{"log":[%b]}}' % b",".join(entries)
    assert answer.failed
    assert not plan.answer([], 7, tails=[tails[0]] * 3).failed


def test_logs_and_documents_are_answered_side_by_side() -> None:
    query = query_of(
        "log,notes,short",
        params={"log": [{"id": "a"}], "notes": [{"id": "a"}], "short": [{"id": "b"}]},
        appendParams={"log": [{"last": 1}], "short": [{"since": 0}]},
    )
    plan = PLANNER.plan(query.encode(), "me")
    assert plan.reads == [("notes/a", 1)]
    assert plan.tails == [("log/a", 0, None, 1, None), ("users/me/log/b", 2, 0, None, 7)]
    assert plan.groups == [(4, None, []), (0, None, []), (5, "me", [])]
    body = plan.answer(["gone"], 7, None, [("h", b"{}", False), "lost"]).body()
    assert json.loads(body)["collections"] == {
        "log": [{"data": {}, "hash": "h", "timestamp": 7}],
        "notes": [{"error": "gone"}],
        "short": [{"error": "lost"}],
    }


@pytest.mark.parametrize(
    ("name", "bounds", "budget"),
    [
        ("log", [{"last": 1}, {"limit": 2, "last": 9}, {"since": 3, "last": 4}, {"since": 3, "limit": 0}], 7),
        ("log", [{"since": 0}, {"since": 9}], 2000),
        ("log", [{}, None, {"last": 0}], 0),
        ("short", [{"last": 900}, {"limit": 3}, {"since": 0}], 17),
        ("notes", [{"last": 900}, {"since": 3}], 1900),
        ("gone", [{"last": 900}, {"since": 3}], 1900),
    ],
)
def test_bounds_count_what_they_may_return(name: str, bounds: list[object], budget: int) -> None:
    sets = [{"id": f"{n}"} for n in range(len(bounds))]
    query = query_of(name, params={name: sets}, appendParams={name: bounds}).encode()
    core.BatchPlanner(ROWS, 9, budget, []).plan(query, "me")
    if budget:
        with pytest.raises(BatchAppendBudgetExceeded):
            core.BatchPlanner(ROWS, 9, budget - 1, []).plan(query, "me")


def test_the_etag_depends_on_logs_bounds_and_hashes() -> None:
    def etag(bounds: object, shown: tuple[str, bytes, bool] | str, log: str = "a") -> str:
        return PLANNER.plan(tailing([bounds], [log]).encode(), "").answer([], 0, tails=[shown]).etag

    empty, tail = ("", b"", False), ("h", b"1", False)
    distinct = [
        etag({"last": 1}, tail),
        etag({"last": 2}, tail),
        etag({"since": 1}, tail),
        etag({"since": 1, "last": 1}, tail),
        etag({"last": 1}, ("i", b"1", False)),
        etag({"last": 1}, empty),
        etag({"last": 1}, "h"),
        etag({"last": 1}, tail, "b"),
    ]
    assert len(set(distinct)) == len(distinct)
    assert etag({"last": 1}, tail) == etag({"limit": 1}, ("h", b"2", True))


def test_each_read_has_one_outcome() -> None:
    plan = PLANNER.plan(query_of("notes", params={"notes": [{"id": "a"}]}).encode(), "")
    for count in (0, 2):
        with pytest.raises(ValueError, match="one outcome"):
            plan.answer([None] * count, 0)
    log = PLANNER.plan(tailing([{"last": 1}]).encode(), "")
    wrong: list[list[tuple[str, bytes, bool] | str] | None] = [None, [], ["a", "b"]]
    for tails in wrong:
        with pytest.raises(ValueError, match="one outcome"):
            log.answer([], 0, None, tails)
