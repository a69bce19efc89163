"""Merging three ways: nothing that one side changed is lost, and what is dropped is told."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync.client import MISSING, Dropped, MergeConflict, ThreeWayMerge, local_wins
from pysync.client.merge import Path, same

Data = dict[str, Any]
MERGE = ThreeWayMerge()

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


@pytest.mark.parametrize(
    ("base", "local", "remote", "merged"),
    [
        ({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 2}),
        ({"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2}),
        ({"a": {"x": 1}}, {"a": {"x": 2}}, {"a": {"x": 1, "z": 1}}, {"a": {"x": 2, "z": 1}}),
        ({}, {"a": {"x": 1}}, {"a": {"y": 1}}, {"a": {"x": 1, "y": 1}}),
        ({"a": None}, {"a": {"x": 1}}, {"a": {"y": 1}}, {"a": {"x": 1, "y": 1}}),
        ({"a": 1}, {"a": True}, {"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}, {"a": 2}, {"a": 2}),
    ],
)  # fmt: skip
def test_objects_are_merged_member_by_member(base: Data, local: Data, remote: Data, merged: Data) -> None:
    result = MERGE.merge(base, local, remote)
    assert same(result, merged)
    assert MERGE.dropped(base, local, remote, result) == []


def titled(*ids: str, **titles: str) -> Data:
    return {"items": [{"id": id_, "title": titles.get(id_, "")} for id_ in ids]}


@pytest.mark.parametrize(
    ("base", "local", "remote", "merged"),
    [
        (titled("a"), titled("a", "m"), titled("a", "r"), titled("a", "r", "m")),
        (titled("a"), titled("m", "a"), titled("r", "a"), titled("r", "m", "a")),
        (titled(), titled("m"), titled("r"), titled("r", "m")),
        (titled("a", "b", "c"), titled("a", "m", "b", "c"), titled("a", "b", "r"),
         titled("a", "m", "b", "r")),
        (titled("a", "b"), titled("a", "b", a="mine"), titled("a", "b", b="theirs"),
         titled("a", "b", a="mine", b="theirs")),
        (titled("a", "b", "c"), titled("c", "a", "b"), titled("a", "b", "c", "r"),
         titled("c", "r", "a", "b")),
        (titled("a", "b", "c"), titled("a", "c", "m"), titled("c", "b", "a"), titled("c", "m", "a")),
        (titled("a", "b"), titled("b"), titled("a", "b", "r"), titled("b", "r")),
        ({}, titled("a", "m"), titled("a", "r"), titled("a", "r", "m")),
    ],
)  # fmt: skip
def test_lists_of_objects_with_ids_are_merged_entry_by_entry(
    base: Data, local: Data, remote: Data, merged: Data
) -> None:
    result = MERGE.merge(base, local, remote)
    assert result == merged
    assert MERGE.dropped(base, local, remote, result) == []


@pytest.mark.parametrize(
    ("base", "local", "remote", "merged", "dropped"),
    [
        ({"a": 1}, {"a": 2}, {"a": 3}, {"a": 2}, Dropped(("a",), 3, local=False)),
        ({}, {"a": 2}, {"a": 3}, {"a": 2}, Dropped(("a",), 3, local=False)),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [1, 3]}, {"a": [1, 2]}, Dropped(("a",), [1, 3], local=False)),
        ({"a": 1}, {}, {"a": 3}, {"a": 3}, Dropped(("a",), MISSING, local=True)),
        ({"a": 1}, {"a": 2}, {}, {"a": 2}, Dropped(("a",), MISSING, local=False)),
        ({"a": {"x": 1}}, {"a": 2}, {"a": {"x": 3}}, {"a": 2}, Dropped(("a",), {"x": 3}, local=False)),
        ({"a": 1}, {"a": True}, {"a": 0}, {"a": True}, Dropped(("a",), 0, local=False)),
        (titled("a"), titled("a", a="mine"), titled("a", a="theirs"), titled("a", a="mine"),
         Dropped(("items", "a", "title"), "theirs", local=False)),
        (titled("a"), titled(), titled("a", a="theirs"), titled("a", a="theirs"),
         Dropped(("items", "a"), MISSING, local=True)),
        (titled("a", "b", "c"), titled("c", "b", "a"), titled("b", "a", "c"), titled("c", "b", "a"),
         Dropped(("items",), titled("b", "a", "c")["items"], local=False)),
        (titled("a"), titled("a", "a"), titled("a", "b"), titled("a", "a"),
         Dropped(("items",), titled("a", "b")["items"], local=False)),
    ],
)  # fmt: skip
def test_of_real_conflicts_the_local_side_wins_and_an_edit_wins_over_a_removal(
    base: Data, local: Data, remote: Data, merged: Data, dropped: Dropped
) -> None:
    result = MERGE.merge(base, local, remote)
    assert same(result, merged)
    assert MERGE.dropped(base, local, remote, result) == [dropped]


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
