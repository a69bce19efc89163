"""Scopes match as the published globs do, denies more widely, and both in linear time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference
from support.depth import depth

import pysync._core as core

globs = st.lists(st.sampled_from(["*", "**", "/", "a", "b", "é", ".", "{identity}"]), max_size=8).map("".join)
document_keys = st.text("ab/é.\n", max_size=10)


@pytest.mark.slow
@settings(max_examples=depth(150, 2400), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "", "!"]), globs).map("".join), max_size=3), document_keys)
def test_a_scope_allows_what_the_twin_allows(paths: list[str], key: str) -> None:
    assert core.Scope(paths, "ab").allows(key) == reference.scope_allows(paths, "ab", key)


@settings(max_examples=depth(125, 2000), deadline=None)
@given(globs, document_keys)
def test_a_deny_never_reads_less_than_an_allow(glob: str, key: str) -> None:
    assert not core.Scope([glob, f"!{glob}"], "ab").allows(key)


@settings(max_examples=depth(75, 1200), deadline=None)
@given(
    st.text("ab/", min_size=60, max_size=200),
    st.lists(st.integers(0, 200), min_size=2, max_size=6),
    st.data(),
)
def test_long_globs_match_as_the_twins_match(key: str, cuts: list[int], data: st.DataObject) -> None:
    """Globs made of the key itself, some of its parts replaced by stars."""
    ends = [0, *sorted(cuts), len(key)]
    parts = [key[start:end] for start, end in itertools.pairwise(ends)]
    glob = "".join(data.draw(st.sampled_from(["*", "**"])) if i % 2 else part for i, part in enumerate(parts))
    assert core.Scope([glob], "").allows(key) == reference.scope_allows([glob], "", key)
    paths = ["**", f"!{glob}"]
    assert core.Scope(paths, "").allows(key) == reference.scope_allows(paths, "", key)


@pytest.mark.parametrize("sign", ["", "!"])
def test_crafted_globs_are_matched_without_backtracking(sign: str) -> None:
    scope = core.Scope(["**", sign + "*a" * 150 + "b"], "")
    assert scope.allows("a" * 1000)
