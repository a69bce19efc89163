"""JSON texts, push bodies and stored documents: the core keeps to its plain Python twins (`reference.py`)."""

import hashlib
import json
import re
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import reference
from support.core_outcome import outcome
from support.depth import depth
from support.json_texts import characters, json_texts, objects, string_texts

import pysync._core as core
from pysync.errors import (
    AuthorProofMissing,
    BodyNotObject,
    BodyTooDeep,
    DocumentCorrupt,
    InvalidBaseHash,
    InvalidData,
    InvalidJson,
    PysyncError,
)

# Push bodies: some of any members, most of members that belong together, in any order and with repetitions.

PROOF = [("authorPubkey", string_texts()), ("authorSignature", string_texts())]
wild_member = st.tuples(
    st.sampled_from(["data", "baseHash", "authorPubkey", "authorSignature", "other", "__proto__"]), json_texts
)


@st.composite
def likely_members(draw: st.DrawFn) -> list[tuple[str, str]]:
    members = [("data", draw(objects(json_texts))) for _ in range(draw(st.integers(1, 2)))]
    members += [("baseHash", draw(st.one_of(st.just("null"), string_texts())))] * draw(st.integers(0, 1))
    if draw(st.booleans()):
        members += [(name, draw(text)) for name, text in PROOF]
    members += [("other", draw(json_texts))] * draw(st.integers(0, 1))
    return draw(st.permutations(members))


bodies = st.one_of(st.lists(wild_member, max_size=5), likely_members(), likely_members()).map(
    lambda members: "{" + ",".join(f'"{key}":{value}' for key, value in members) + "}"
)
broken_texts = st.builds(
    lambda text, at, junk: text[: at % (len(text) + 1)] + junk + text[at % (len(text) + 1) + 1 :],
    json_texts,
    st.integers(0, 10_000),
    st.sampled_from(
        ["", ",", "}", "]", "NaN", "-Infinity", "\\ud800", "\\u12", "\x01", "'", "01", "+1", "//", '"']
    ),
)


@pytest.mark.slow
@settings(max_examples=depth(100, 1600), deadline=None)
@given(json_texts)
@example('{"\\u0000":1,"!":2,"\\"":3,"#":4,"\\\\":5,"]":6,"[":7,"\\u007f":8}')
@example('{"b":1,"a":2,"b":3,"ab":4,"a":5}')
@example("[" * 64 + "]" * 64)
@example("[" * 65 + "]" * 65)
@example("[" * 100_000)
@example('"\\ud83d\\ude00\\ud83d"')
def test_canonical_text_is_the_twins(text: str) -> None:
    raw = text.encode()
    if text.startswith("[[[[[["):
        expected: object = raw if len(raw) == 128 else BodyTooDeep
    else:
        expected = outcome(reference.canonicalize, raw)
    assert outcome(core.canonicalize, raw) == expected
    if isinstance(expected, bytes):
        assert core.content_hash(raw) == hashlib.sha256(expected).hexdigest()
        assert core.canonicalize(expected) == expected


@pytest.mark.slow
@settings(max_examples=depth(75, 1200), deadline=None)
@given(broken_texts)
@example('{"a":1}{"b":2}')
@example('{"a":"\\ud800","a":1}')
@example("\ufeff{}")
@example("")
def test_broken_text_is_rejected_exactly_where_the_twin_rejects_it(text: str) -> None:
    raw = text.encode()
    assert outcome(core.canonicalize, raw) == outcome(reference.canonicalize, raw)


@settings(max_examples=depth(50, 800), deadline=None)
@given(st.binary(max_size=60))
@example(b'{"data":{},"":true}')
def test_any_bytes_are_an_answer_or_a_rejection(raw: bytes) -> None:
    assert outcome(core.canonicalize, raw) == outcome(reference.canonicalize, raw)
    pushed, expected = outcome(core.decode_push, raw), outcome(reference.decode_push, raw)
    assert (pushed.hash if isinstance(pushed, core.PushBody) else pushed) == (
        expected[2] if isinstance(expected, tuple) else expected
    )
    assert outcome(core.read_document, raw) is DocumentCorrupt


@settings(max_examples=depth(125, 2000), deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_number_text_is_ecmascripts_and_reads_back_as_the_number(number: float) -> None:
    text = core.canonicalize(repr(number).encode()).decode()
    assert text == reference.number_text(number)
    assert float(text) == number


@settings(max_examples=depth(200, 4000), deadline=None)
@given(st.from_regex(r"-?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{0,3})?", fullmatch=True))
@example("123456789012345.6")
@example("0.123456789012345")
@example("0.1234567890123456")
@example("0.00000123")
@example("0.000000123")
@example("9007199254740991")
@example("9007199254740993")
@example("0." + "0" * 70_000 + "1e70001")
@example("1" + "0" * 70_000 + "e-70000")
def test_a_number_is_written_as_the_twin_writes_it(text: str) -> None:
    for raw in (text.encode(), f"[{text},-{text}]".encode()):
        assert outcome(core.canonicalize, raw) == outcome(reference.canonicalize, raw)


@pytest.mark.parametrize(
    "inner",
    ["", '"', "\\", "\\n", "\\/", "\\u0001", "\\u00e9", "\\ud83d\\ude00", "\x1f", "\x7f", "é", "\U0001f600"],
)
def test_a_string_of_any_length_is_written_as_the_twin_writes_it(inner: str) -> None:
    for before in range(18):
        for after in range(18):
            string = f'"{"a" * before}{inner}{"ö" * (after % 2)}{"b" * after}"'
            for raw in (string.encode(), f'{{{string}:1,"b":{string}}}'.encode(), string[:-1].encode()):
                assert outcome(core.canonicalize, raw) == outcome(reference.canonicalize, raw)


def push_parts(body: bytes) -> tuple[bytes, bytes, str, str | None, str | None, str | None]:
    push = core.decode_push(body)
    author = push.author_pubkey, push.author_signature
    return push.data, push.canonical, push.hash, push.base_hash, *author


@pytest.mark.slow
@settings(max_examples=depth(100, 1600), deadline=None)
@given(st.one_of(bodies, json_texts))
@example('{"data":{"a":1},"data":[]}')
@example('{"data":{"__proto__":{"a":1},"q":[{"__proto__":1}],"a":{"constructor":1,"b":2}}}')
def test_a_push_body_decodes_as_the_twin_decodes_it(body: str) -> None:
    raw = body.encode()
    assert outcome(push_parts, raw) == outcome(reference.decode_push, raw)


@pytest.mark.slow
@settings(max_examples=depth(50, 800), deadline=None)
@given(bodies, st.integers(0, 2**53), st.integers(0, 2**53))
def test_a_stored_push_is_the_twins_and_pulls_back_whole(body: str, ts_ms: int, now_ms: int) -> None:
    raw = body.encode()
    if not isinstance(outcome(push_parts, raw), tuple):
        return
    push = core.decode_push(raw)
    stored = push.stored(ts_ms)
    author = push.author_pubkey, push.author_signature
    earlier = reference.stored(push.data, push.hash, ts_ms, *author)
    assert re.fullmatch(re.escape(earlier[:-1]) + rb',"xxh3":"[0-9a-f]{32}"\}', stored)
    for kept in (stored, earlier):
        document = core.read_document(kept)
        assert document.verify()
        assert (document.data, document.hash, document.ts_ms) == (push.data, push.hash, ts_ms)
        assert (document.author_pubkey, document.author_signature) == author
        assert document.answer(now_ms) == reference.pull_body(stored, now_ms)
    with_keyring = document.answer(now_ms, b'{"data":{},"hash":"","timestamp":1}')
    assert with_keyring == document.answer(now_ms)[:-1] + b',"keyring":{"data":{},"hash":"","timestamp":1}}'


edges = [sign * edge + step for edge in (2**53, 2**63, 2**64) for sign in (-1, 1) for step in (-1, 0, 1)]
integers_of_64_bits = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([edge for edge in edges if -(2**63) <= edge < 2**64]),
)
trees_of_integers = st.dictionaries(
    st.text(characters, max_size=3).map("k{}".format),
    st.recursive(
        integers_of_64_bits,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=depth(100, 1600), deadline=None)
@given(trees_of_integers)
@example({"k": [2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1]})
def test_integers_of_64_bits_come_back_exactly_and_are_hashed_as_doubles(data: dict[str, object]) -> None:
    push = core.decode_push(json.dumps({"data": data}).encode())
    document = core.read_document(push.stored(7))
    assert json.loads(push.data) == json.loads(document.data) == data
    assert json.loads(document.answer(8))["data"] == data
    assert push.canonical == reference.canonical(data).encode() == core.canonicalize(document.data)
    assert document.hash == push.hash == hashlib.sha256(push.canonical).hexdigest()


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        (b"", InvalidJson),
        (b"{", InvalidJson),
        (b"[NaN]", InvalidJson),
        (b'{"data":{"a":NaN}}', InvalidJson),
        (b'{"data":{},"other":"\\ud800"}', InvalidJson),
        (b'{"data":{},"other":1e400}', InvalidJson),
        (b'{"data":{},"\\udc00":1}', InvalidJson),
        (b'{"data":{"a":"\xff"}}', InvalidJson),
        (b'{"data":{}} {}', InvalidJson),
        (b'{"data":' + b'{"a":' * 64 + b"1" + b"}" * 65, BodyTooDeep),
        (b'{"data":{},"other":' + b"[" * 64 + b"]" * 64 + b"}", BodyTooDeep),
        (b" [] ", BodyNotObject),
        (b'"data"', BodyNotObject),
        (b"{}", InvalidData),
        (b'{"data":[],"baseHash":1}', InvalidData),
        (b'{"data":{},"baseHash":1,"authorPubkey":"p"}', InvalidBaseHash),
        (b'{"data":{},"baseHash":{}}', InvalidBaseHash),
        (b'{"data":{},"authorPubkey":"p"}', AuthorProofMissing),
        (b'{"data":{},"authorSignature":"s","authorPubkey":null}', AuthorProofMissing),
        (b'{"data":{},"authorSignature":1,"authorPubkey":2}', AuthorProofMissing),
    ],
)
def test_a_bad_push_body_is_rejected_for_its_first_fault(body: bytes, error_type: type[PysyncError]) -> None:
    with pytest.raises(error_type):
        core.decode_push(body)


def test_a_push_body_may_nest_sixty_four_deep() -> None:
    body = b'{"data":' + b'{"a":' * 63 + b"1" + b"}" * 64
    assert core.decode_push(body).data == body[len(b'{"data":') : -1]


STORED = core.decode_push(b'{"data":{"a":"b","n":[1,2]}}').stored(5)


@given(st.integers(0, len(STORED) - 1), st.integers(1, 255))
def test_a_damaged_document_is_corrupt_or_still_well_formed(at: int, change: int) -> None:
    damaged = bytearray(STORED)
    damaged[at] ^= change
    try:
        document = core.read_document(bytes(damaged))
    except DocumentCorrupt:
        return
    value = json.loads(damaged)
    assert json.loads(document.data) == value["data"]
    assert document.hash == value["hash"]


@pytest.mark.parametrize("length", range(len(STORED)))
def test_a_truncated_document_is_corrupt(length: int) -> None:
    with pytest.raises(DocumentCorrupt):
        core.read_document(STORED[:length])


HASH = hashlib.sha256(b"{}").hexdigest().encode()


def test_documents_of_starfish_are_read_in_any_layout() -> None:
    hash_ = reference.content_hash('{"b":1,"a":"é"}'.encode())
    text = (
        b' {"data" : {"b": 1.0 , "a":"\\u00e9"},"hash":"' + hash_.encode() + b'","extra":[1],'
        b'"authorSignature":"s","authorPubkey":"p"} '
    )
    document = core.read_document(text)
    assert (document.hash, document.ts_ms) == (hash_, 0)
    assert document.data == b'{"b": 1.0 , "a":"\\u00e9"}'
    assert json.loads(document.answer(9)) == {
        "data": {"b": 1, "a": "é"},
        "hash": hash_,
        "timestamp": 9,
        "authorPubkey": "p",
        "authorSignature": "s",
    }
    assert core.read_document(b'{"hash":"' + HASH + b'","data":{},"ts":12}').ts_ms == 12


@pytest.mark.parametrize(
    ("data", "canonical"),
    [
        (r'{"b":"cut \ud83d","a":1}', r'{"a":1,"b":"cut \ud83d"}'),
        (r'{"b":"\uDE00 cut","a":"\uD83D\uDE00\\ud83d"}', '{"a":"\U0001f600\\\\ud83d","b":"\\ude00 cut"}'),
        (r'{"\ud83dx":1,"\uffff":2,"é":3,"":4}', '{"":4,"é":3,"\\ud83dx":1,"\uffff":2}'),
        ('{"b":1,"a":' + "[" * 120 + "]" * 120 + "}", '{"a":' + "[" * 120 + "]" * 120 + ',"b":1}'),
    ],
    ids=["first half", "second half and a pair", "in names", "deep"],
)
def test_documents_of_starfish_hold_what_ours_may_not(data: str, canonical: str) -> None:
    """Half an emoji, as JavaScript cuts one, is an escape in what is hashed."""
    hash_ = hashlib.sha256(canonical.encode()).hexdigest()
    text = f'{{"v":1,"data":{data},"ts":1,"hash":"{hash_}"}}'.encode()
    document = core.read_document(text)
    assert (document.hash, document.data) == (hash_, data.encode())
    assert document.verify()
    with pytest.raises(DocumentCorrupt):
        core.read_document(text.replace(b"cut", b"cat").replace(b":1", b":7"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b'{"hash":"","data":{}}',
        b'{"hash":1,"data":{}}',
        b'{"hash":"h","data":{}}',
        b'{"hash":"' + HASH.upper() + b'","data":{}}',
        b'{"hash":"' + HASH[1:] + b'\\n","data":{}}',
        b'{"hash":"' + HASH + b'"}',
        b'{"hash":"' + HASH + b'","data":[]}',
        b'{"hash":"' + HASH + b'","data":{}',
        b'{"hash":"' + HASH + b'","data":{}}}',
        STORED + b"}",
        STORED + b"\0",
        b'{"hash":"' + HASH + b'","data":{"a":NaN}}',
        b'{"hash":"' + HASH + b'","data":{"a":"\xff"}}',
    ],
)
def test_malformed_document_is_corrupt(text: bytes) -> None:
    with pytest.raises(DocumentCorrupt):
        core.read_document(text)


def test_threads_decode_long_bodies_side_by_side() -> None:
    body = json.dumps({"data": {str(i): [i, "x" * 20] for i in range(20_000)}}).encode()
    expected, hashes = core.decode_push(body).hash, list[str]()
    threads = [threading.Thread(target=lambda: hashes.append(core.decode_push(body).hash)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hashes == [expected] * 4
