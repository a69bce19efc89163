"""Append-only logs that Starfish wrote: read as they are, and taken over by the first append."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference_append_log as twin
from support.core_append_log import DATA, NOW_MS, PROOFS, Kept
from support.depth import depth

import pysync._core as core
from pysync.errors import DocumentCorrupt

starfish_elements = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from(DATA), st.sampled_from(PROOFS)), min_size=1, max_size=40
)
besides = st.dictionaries(
    st.sampled_from(["a", "z", "é", "items2"]), st.sampled_from([1, None, "x", {"b": [2**60]}])
)


def starfish_log(elements: list[tuple[int, Any, Any]]) -> twin.Log:
    made, ts_ms = [], NOW_MS
    for step, data, proof in elements:
        ts_ms += step
        made.append(twin.Element(ts_ms, data, proof))
    return twin.Log(tuple(made))


@settings(max_examples=depth(50, 800), deadline=None)
@given(
    starfish_elements,
    st.sampled_from(["items", "entries", "ü"]),
    besides,
    st.randoms(use_true_random=False),
    st.sampled_from([{}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}]),
)
def test_a_document_of_starfish_is_a_log_in_any_layout(
    elements: Any, field: str, extra: dict[str, Any], random: Any, style: dict[str, Any]
) -> None:
    log = starfish_log(elements)
    stored = twin.starfish_document(log, field, extra)
    members, inner = list(stored.items()), list(stored["data"].items())
    random.shuffle(members)
    random.shuffle(inner)
    text = json.dumps({name: dict(inner) if name == "data" else value for name, value in members}, **style)
    kept = Kept(core.LogHead.read(text.encode(), field))
    assert not kept.head.is_chunked
    assert (kept.head.count, kept.head.hash) == (log.count, log.hash)
    assert kept.read(None, None, None) == log.within()
    assert kept.read(NOW_MS + 5, 3, None) == log.within(NOW_MS + 5, 3)
    assert json.loads(kept.head.beside or "{}") == extra
    # The first append takes it over, and from then on it is a log of ours.
    kept.head = kept.head.adopted("0a1b")
    wanted = [twin.Element(None, {"after": n}) for n in range(3)]
    for max_bytes in (300, 10_000):
        kept.seal(max_bytes)
        log, expected = log.append(wanted, NOW_MS, None)
        assert kept.append(wanted, NOW_MS, None, ["", "", ""]) == expected
        kept.reread()
        assert kept.read(None, None, None) == log.within()
        assert json.loads(kept.head.beside or "{}") == extra


@settings(max_examples=depth(50, 800), deadline=None)
@given(
    starfish_elements.filter(lambda elements: len(elements) > 1),
    st.integers(1, 12),
    besides,
    st.integers(0, 1),
)
def test_chunks_of_starfish_are_a_log_even_where_its_head_fell_behind(
    elements: Any, chunk_size: int, extra: dict[str, Any], behind: int
) -> None:
    log = starfish_log(elements)
    stored = {
        key: json.dumps(value).encode()
        for key, value in twin.starfish_chunks(log, "log/a", chunk_size, extra, behind).items()
    }
    head = core.LogHead.read(stored.pop("log/a"), "items")
    assert head.is_chunked
    kept = Kept(head.gather([stored[key] for key in sorted(stored)]))
    assert (kept.head.count, kept.head.hash) == (log.count, log.hash)
    assert kept.read(None, None, None) == log.within()
    assert json.loads(kept.head.beside or "{}") == extra


@pytest.mark.parametrize("chunk", [b"", b"{}", b"[1]", b'[{"ts":1}]', b'[{"ts":1,"data":{}}', b"null"])
def test_malformed_chunk_is_corrupt(chunk: bytes) -> None:
    head = core.LogHead.read(b'{"v":1,"seg":true,"data":{},"n":1,"ts":1,"hash":""}', "items")
    with pytest.raises(DocumentCorrupt):
        head.gather([chunk])
