"""The protocol's vectors through the Python face of the core. `vectors.rs` runs all that concern the core."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import pysync._core as core
from pysync.errors import InvalidJson

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "protocol.json").read_text())


def records(section: str) -> list[Any]:
    return [pytest.param(record, id=f"{section}-{record['id']}") for record in VECTORS[section]]


def followed(record: dict[str, Any]) -> Any:
    """What both published sides do, or what is recommended where they differ."""
    return record["expected"] if record["agree"] else record["recommended"]


@pytest.mark.parametrize("record", records("canonical"))
def test_canonical_text_and_hash(record: dict[str, Any]) -> None:
    text = record["inputJson"].encode()
    if record["id"].startswith(("overflow-", "lone-")):
        with pytest.raises(InvalidJson):
            core.canonicalize(text)
        return
    assert core.canonicalize(text).decode() == followed(record)["canonical"]
    assert core.content_hash(text) == followed(record)["sha256"]


@pytest.mark.parametrize("record", records("request_signing"))
def test_signed_requests_verify(record: dict[str, Any]) -> None:
    method, target = record["method"], record["pathAndQuery"]
    body, host, ts_ms = bytes.fromhex(record["bodyHex"] or ""), record["host"] or "", record["ts"]
    expected = record["expected"]
    message = core.request_message(method, target, body, host, ts_ms, expected["nonce"])
    assert message.decode() == expected["canonicalInput"]
    key = core.PublicKey(record["pubKey"])
    assert key.verify(message, expected["sig"])
    targets = ["/mount" + target, target]
    assert core.verify_request(key, expected["sig"], method, targets, body, host, ts_ms, expected["nonce"])


@pytest.mark.parametrize("record", records("request_verify"))
def test_tampered_requests_do_not_verify(record: dict[str, Any]) -> None:
    verified = core.verify_request(
        core.PublicKey(record["pubKey"]),
        record["sig"],
        record["method"],
        [record["pathAndQuery"]],
        bytes.fromhex(record["bodyHex"]),
        record["host"],
        record["ts"],
        record["nonce"],
    )
    # Stricter than both published sides: padded standard base64 and nothing else.
    # See docs/reference/protocol.md#authentication.
    assert verified == (followed(record) is True and "\n" not in record["sig"])


@pytest.mark.parametrize("record", records("append_author"))
def test_author_proofs_hold(record: dict[str, Any]) -> None:
    data = core.canonicalize(json.dumps(record["data"]).encode())
    for tag, proof in (("starfish-append-author-v1", "append"), ("starfish-doc-author-v1", "doc")):
        author = record["expected"][proof]
        signed = (author["authorPubkey"], author["authorSignature"])
        assert core.verify_author(tag, record["documentKey"], data, *signed)
        assert not core.verify_author(tag, record["documentKey"] + "x", data, *signed)


@pytest.mark.parametrize("record", records("ed25519_edges"))
def test_edge_case_keys_and_signatures_carry_no_authorship(record: dict[str, Any]) -> None:
    data = core.canonicalize(json.dumps(record["data"]).encode())
    proof = (record["pubKey"], record["authorSignature"])
    assert not core.verify_author("starfish-append-author-v1", record["documentKey"], data, *proof)


@pytest.mark.parametrize("record", records("path_glob"))
def test_allow_globs_match(record: dict[str, Any]) -> None:
    # A scope drops the empty segments of a key, the glob alone (in `vectors.rs`) sees them.
    if "" in record["target"].split("/"):
        key = record["target"].strip("/").replace("//", "/")
        assert core.Scope([key], "").allows(record["target"])
    else:
        assert core.Scope([record["glob"]], "").allows(record["target"]) == record["expected"]


@pytest.mark.parametrize("record", records("scope_path_match"))
def test_scopes_allow(record: dict[str, Any]) -> None:
    # Keys reach the core decoded ("decode once before matching").
    key = record["requestPath"].replace("%6b", "k").replace("%2F", "/")
    allowed = core.Scope(record["scopePaths"], "me").allows(key)
    assert allowed == (record["agree"] and record["expected"])


def test_user_ids_are_those_of_the_vectors() -> None:
    for owner in VECTORS["meta"]["keys"].values():
        key = core.PublicKey(owner["edPub"])
        assert (key.hex, key.user_id) == (owner["edPub"], owner["userId"])
        assert key.user_id == hashlib.sha256(bytes.fromhex(owner["edPub"])).hexdigest()[:32]
