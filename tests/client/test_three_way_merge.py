"""Merging three ways: nothing that one side changed is lost, and what is dropped is told."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync.client import (
    MISSING,
    Dropped,
    MergeConflict,
    ThreeWayMerge,
    local_wins,
    merge_remote_wins,
)
from pysync.client.merge import Path, same

Data = dict[str, Any]
MERGE = ThreeWayMerge()
VECTORS: Data = json.loads((FilePath(__file__).parents[1] / "vectors/merge.json").read_text())
RULES: dict[str, Callable[[MergeConflict], Any]] = {
    "local": local_wins,
    "remote": lambda conflict: conflict.remote,
    "base": lambda conflict: conflict.base,
    "remove": lambda _: MISSING,
    "list": lambda conflict: [
        value for value in (conflict.base, conflict.local, conflict.remote) if value is not MISSING
    ],
}

scalars = st.sampled_from([None, True, 0, 1, 1.5, "", "a", "b"])


def documents_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Data]:
    return st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)


def entries_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Data]]:
    def entries(ids: list[object]) -> st.SearchStrategy[tuple[Data, ...]]:
        return st.tuples(*(documents_of(inner).map(partial(with_id, id_)) for id_ in ids))

    ids = st.lists(st.sampled_from(["a", "b", "c", 1, 2]), unique=True, max_size=4)
    return ids.flatmap(entries).map(list)


def with_id(id_: object, entry: Data) -> Data:
    return {"id": id_, **entry}


values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=2), documents_of(inner), entries_of(inner)),
    max_leaves=6,
)
documents = documents_of(values)


@st.composite
def edited(draw: st.DrawFn, value: Any) -> Any:
    """Return an edit of `value` that keeps some of it."""
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(values)
    if isinstance(value, dict):
        kept = {
            name: draw(edited(member)) if name != "id" else member
            for name, member in value.items()
            if name == "id" or draw(st.integers(0, 5))
        }
        return kept | draw(documents_of(values)) if kind == 1 else kept
    if isinstance(value, list):
        entries = [draw(edited(entry)) for entry in value if draw(st.integers(0, 5))]
        entries += draw(entries_of(values)) if kind == 1 else []
        return draw(st.permutations(entries)) if kind == 2 else entries
    return value


def by_id(value: Any) -> dict[Any, Any] | None:
    """The entries of a list by their ids; None for what is no list of entries."""
    if not isinstance(value, list):
        return None
    ids = [entry.get("id") if isinstance(entry, dict) else None for entry in value]
    if not all(isinstance(id_, str | int) and not isinstance(id_, bool) for id_ in ids):
        return None
    return dict(zip(ids, value, strict=True)) if len({*ids}) == len(ids) else None


@st.composite
def versions(draw: st.DrawFn) -> tuple[Data, Data, Data]:
    """A document, and what two people made of it."""
    base = draw(documents)
    local, remote = (draw(edited(base)) for _ in range(2))
    return base, local if isinstance(local, dict) else {}, remote if isinstance(remote, dict) else {}


def at(document: Any, path: Path) -> Any:
    """The value at `path`, MISSING where there is none."""
    for name in path:
        if isinstance(document, list):
            found = by_id(document)
            document = MISSING if found is None else found.get(name, MISSING)
        else:
            document = document.get(name, MISSING) if isinstance(document, dict) else MISSING
    return document


def paths(document: Any, path: Path = ()) -> list[Path]:
    """The paths of everything in it."""
    inner = by_id(document) if isinstance(document, list) else document
    if not isinstance(inner, dict):
        return [path]
    return [path, *(found for name, value in inner.items() for found in paths(value, (*path, name)))]


def in_any_order(value: Any) -> Any:
    """The value, its lists of entries sorted."""
    if isinstance(value, dict):
        return {name: in_any_order(member) for name, member in value.items()}
    if by_id(value):
        return sorted(map(in_any_order, value), key=lambda entry: str(entry["id"]))
    return value


@given(versions())
def test_every_edit_is_in_the_merge_or_reported_as_dropped(sides: tuple[Data, Data, Data]) -> None:
    base, local, remote = sides
    merged = MERGE.merge(base, local, remote)
    dropped = MERGE.dropped(base, local, remote, merged)
    for is_local, mine, other in ((True, local, remote), (False, remote, local)):
        paths_dropped = {drop.path for drop in dropped if drop.local is is_local}
        for path in {*paths(base), *paths(mine)}:
            is_mine_alone = not same(at(mine, path), at(base, path)) and same(at(other, path), at(base, path))
            if is_mine_alone and not any(path[:end] in paths_dropped for end in range(len(path) + 1)):
                assert same(in_any_order(at(merged, path)), in_any_order(at(mine, path)))


@given(versions())
def test_only_what_both_sides_changed_is_dropped(sides: tuple[Data, Data, Data]) -> None:
    base, local, remote = sides
    merged = MERGE.merge(base, local, remote)
    for drop in MERGE.dropped(base, local, remote, merged):
        mine, other = (local, remote) if drop.local else (remote, local)
        assert same(at(mine, drop.path), drop.value)
        assert not same(at(mine, drop.path), at(base, drop.path))
        assert not same(at(other, drop.path), at(base, drop.path))
        assert not same(at(mine, drop.path), at(other, drop.path))


@given(versions())
def test_nothing_of_the_local_side_is_dropped_but_removals_of_what_was_edited(
    sides: tuple[Data, Data, Data],
) -> None:
    merged = MERGE.merge(*sides)
    for drop in MERGE.dropped(*sides, merged):
        assert not drop.local or drop.value is MISSING


@given(documents, documents)
def test_the_same_edit_on_both_sides_is_no_conflict(base: Data, edited: Data) -> None:
    def conflicts(conflict: MergeConflict) -> Any:
        raise AssertionError(conflict)

    strict = ThreeWayMerge(conflicts)
    assert same(strict.merge(base, edited, edited), edited)
    assert same(strict.merge(base, edited, base), edited)
    assert same(strict.merge(base, base, edited), edited)
    assert not strict.dropped(base, edited, edited, edited)


@given(versions())
def test_a_merge_that_is_merged_again_stays_what_it_is(sides: tuple[Data, Data, Data]) -> None:
    base, _, remote = sides
    merged = MERGE.merge(*sides)
    assert same(MERGE.merge(remote, merged, remote), merged)
    assert same(in_any_order(MERGE.merge(base, merged, remote)), in_any_order(merged))


@pytest.mark.slow
@given(versions())
def test_without_conflicts_it_does_not_matter_who_was_first(sides: tuple[Data, Data, Data]) -> None:
    base, local, remote = sides
    met: list[MergeConflict] = []

    def note(conflict: MergeConflict) -> Any:
        met.append(conflict)
        return local_wins(conflict)

    merged = ThreeWayMerge(note).merge(base, local, remote)
    if not met:
        assert same(in_any_order(MERGE.merge(base, remote, local)), in_any_order(merged))


@pytest.mark.slow
@given(versions())
def test_the_versions_that_are_merged_are_not_changed(sides: tuple[Data, Data, Data]) -> None:
    before = repr(sides)
    MERGE.dropped(*sides, MERGE.merge(*sides))
    assert repr(sides) == before


def removal_marked(drop: Dropped) -> Data:
    """A dropped edit as the vectors have it."""
    value = {"removed": True} if drop.value is MISSING else {"value": drop.value}
    return {"path": [*drop.path], **value, "local": drop.local}


def same_in_any_order(one: list[Any], other: list[Any]) -> bool:
    """True if both hold the same JSON values."""
    texts = (sorted(json.dumps(value, sort_keys=True) for value in values) for values in (one, other))
    return next(texts) == next(texts)


@pytest.mark.parametrize("vector", [pytest.param(case, id=case["id"]) for case in VECTORS["threeWay"]])
def test_a_merge_is_that_of_the_vectors(vector: Data) -> None:
    def rule(conflict: MergeConflict) -> Any:
        met.append([*conflict.path])
        return RULES[vector.get("rule", "local")](conflict)

    met: list[Any] = []
    merge = ThreeWayMerge(rule, vector.get("idMember", "id"))
    versions = (vector["base"], vector["local"], vector["remote"])
    merged = merge.merge(*versions)
    dropped = [*map(removal_marked, merge.dropped(*versions, merged))]
    assert same(merged, vector["merged"])
    assert same_in_any_order(met, vector["conflicts"])
    assert same_in_any_order(dropped, vector["dropped"])


@pytest.mark.parametrize("vector", VECTORS["remoteWins"])
def test_a_merge_without_a_base_is_that_of_the_vectors(vector: Data) -> None:
    assert same(merge_remote_wins(vector["local"], vector["remote"]), vector["merged"])


@pytest.mark.parametrize(
    "entries",
    [["a"], [{"id": None}], [{"id": True}], [{"id": 1.0}], [{"name": "a"}], [{"id": "a"}, {"id": "a"}]],
)
def test_a_list_without_ids_is_one_value(entries: list[Any]) -> None:
    met: list[Path] = []

    def note(conflict: MergeConflict) -> Any:
        met.append(conflict.path)
        return conflict.remote

    merge = ThreeWayMerge(note)
    assert merge.merge({}, {"x": [*entries]}, {"x": [*entries, {"id": "b"}]})["x"][-1] == {"id": "b"}
    assert met == [("x",)]


def test_entries_are_distinguished_by_the_named_member() -> None:
    def tags(*names: str) -> Data:
        return {"tags": [{"name": name} for name in names]}

    by_name = ThreeWayMerge(id_member="name")
    assert by_name.merge(tags("a"), tags("a", "m"), tags("a", "r")) == tags("a", "r", "m")


def test_a_function_of_ones_own_decides_about_conflicts_alone() -> None:
    def join(conflict: MergeConflict) -> Any:
        conflicts.append(conflict)
        if MISSING in (conflict.local, conflict.remote):
            return MISSING
        return conflict.local + conflict.remote

    conflicts: list[MergeConflict] = []
    base = {"text": "a", "gone": 1, "mine": 1, "theirs": 1}
    local = {"text": "b", "gone": 2, "mine": 2, "theirs": 1}
    remote = {"text": "c", "mine": 1, "theirs": 2}
    merge = ThreeWayMerge(join)
    merged = merge.merge(base, local, remote)
    assert merged == {"text": "bc", "mine": 2, "theirs": 2}
    assert conflicts == [
        MergeConflict(("text",), "a", "b", "c"),
        MergeConflict(("gone",), 1, 2, MISSING),
    ]
    # Of the text both are there; of the edit nothing is left.
    assert merge.dropped(base, local, remote, merged) == [Dropped(("gone",), 2, local=True)]
