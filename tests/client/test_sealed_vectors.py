"""Sealed data is byte by byte that of the published clients."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pysync.auth.identity_keys import IdentityKeys
from pysync.client.sealed import (
    AadRequired,
    DecryptionFailed,
    ForgedEntry,
    Keyring,
    Truncated,
    UnknownEpoch,
    UnlockedKeyring,
    crypto,
    open_envelope,
)

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/protocol.json").read_text())
DELEGATED = VECTORS["delegated_envelope"]
ADDER = IdentityKeys.from_private(b"\x11" * 32, b"\x31" * 32)


def records(section: list[Any]) -> list[Any]:
    return [pytest.param(record, id=record["id"]) for record in section]


def known(*values: str) -> Callable[[int], bytes]:
    """A source of randomness that gives these, in hex, by their sizes."""
    left = [bytes.fromhex(value) for value in values]

    def random(size: int) -> bytes:
        value = next(value for value in left if len(value) == size)
        left.remove(value)
        return value

    return random


def keyring(*random: str) -> UnlockedKeyring:
    """The vectors' keyring, opened by its recipient."""
    recipient = IdentityKeys.from_private(
        b"\x11" * 32, bytes.fromhex(DELEGATED["keyring"]["recipient"]["kemPriv"])
    )
    read = Keyring(DELEGATED["keyring"]["document"])
    return read.open(recipient, DELEGATED["keyring"]["trustedAdders"], random=known(*random))


def delegated(id_: str) -> dict[str, Any]:
    found: dict[str, Any] = next(case for case in DELEGATED["cases"] if case["id"] == id_)
    return found


@pytest.mark.parametrize("record", records(VECTORS["keyring_wrap"]))
def test_a_content_key_is_wrapped_and_unwrapped_as_published(record: dict[str, Any]) -> None:
    assert record["adderEdPriv"] == ADDER.ed_priv
    entry = crypto.wrap_key(
        bytes.fromhex(record["cek"]),
        record["recipientKemPub"],
        record["epoch"],
        ADDER,
        now_s=record["addedAt"],
        random=known(record["ephemeralPriv"], record["iv"]),
    )
    assert entry == record["expected"]["entry"]
    recipient = IdentityKeys.from_private(bytes([9]) * 32, bytes.fromhex(record["recipientKemPriv"]))
    crypto.verify_entry(entry, record["epoch"], [ADDER.ed_pub])
    assert crypto.unwrap_key(entry, recipient).hex() == record["expected"]["unwrappedCek"]
    with pytest.raises(ForgedEntry):
        crypto.verify_entry(entry, record["epoch"] + 1, [ADDER.ed_pub])


def test_a_published_keyring_opens_with_all_its_epochs() -> None:
    opened = keyring()
    assert opened.epoch == 2
    content_keys = {str(epoch): key.hex() for epoch, key in opened.content_keys.items()}
    assert content_keys == DELEGATED["keyring"]["ceks"]


def test_a_keyring_is_made_as_published() -> None:
    """The vectors' keyring, made again: two recipients, of whom the second is removed."""
    document = DELEGATED["keyring"]["document"]
    first, second = (entry["subKem"] for entry in document["epochs"]["1"]["wrappedKeys"])
    owner = IdentityKeys.from_private(
        b"\x11" * 32, bytes.fromhex(DELEGATED["keyring"]["recipient"]["kemPriv"])
    )
    assert owner.kem_pub == first
    made = Keyring.new(owner, [second], now_s=1700000001)
    rotated = made.remove(second, owner, [owner.ed_pub], now_s=1700000002)
    assert rotated.recipients == (first,)
    assert shape(rotated.data) == shape(document)


def shape(value: Any) -> Any:
    """A document with its texts and arrays reduced to how long they are, its numbers kept."""
    if isinstance(value, dict):
        return {name: shape(member) for name, member in value.items()}
    if isinstance(value, list):
        return [shape(member) for member in value]
    return len(value) if isinstance(value, str) else value


def test_a_document_is_sealed_as_the_typescript_client_does() -> None:
    case = delegated("unicode")
    assert keyring(case["iv"]).seal(case["data"]) == case["typescript"]


@pytest.mark.parametrize("client", ["python", "typescript"])
def test_a_document_opens_whichever_client_sealed_it(client: str) -> None:
    case = delegated("unicode")
    assert keyring().open(case[client]) == case["data"]


def test_a_document_that_names_no_epoch_is_of_the_current_one() -> None:
    case = delegated("epoch-missing-uses-current")
    assert keyring().open(case["payload"]) == case["python"]
    others: list[Any] = ["1", 1.5, True, None, []]
    for named in others:
        assert keyring().open({**case["payload"], "_epoch": named}) == case["python"]


@pytest.mark.parametrize(
    ("id_", "error", "text"),
    [
        ("epoch-flipped", DecryptionFailed, "Decryption failed"),
        ("unknown-epoch", UnknownEpoch, "No key available for epoch 9"),
        ("too-short", Truncated, "Encrypted payload is too short"),
    ],
)
def test_each_failure_has_its_class_and_the_published_text(
    id_: str, error: type[Exception], text: str
) -> None:
    case = delegated(id_)
    assert case["python"].startswith(f"ERROR {text}")
    with pytest.raises(error, match=f"^{text}"):
        keyring().open(case["payload"])


@pytest.mark.parametrize("record", records(VECTORS["sealed_blob"]["cases"]))
def test_bytes_are_sealed_and_opened_as_published(record: dict[str, Any]) -> None:
    plaintext, aad = bytes.fromhex(record["plaintextHex"]), record["aad"] or ""
    sealed = keyring(record["iv"]).seal_bytes(plaintext, aad)
    assert sealed.hex() == record["expected"]["blobHex"]
    assert keyring().open_bytes(sealed, aad).hex() == record["expected"]["opened"]
    with pytest.raises(DecryptionFailed):
        keyring().open_bytes(sealed, aad + "x")


@pytest.mark.parametrize("record", records(VECTORS["seal_envelope"]))
@pytest.mark.parametrize("client", ["python", "typescript"])
def test_an_envelope_opens_whichever_client_sealed_it(record: dict[str, Any], client: str) -> None:
    recipient = IdentityKeys.from_private(bytes([9]) * 32, bytes.fromhex(record["recipientKemPriv"]))
    envelope, aad, sealer = record[f"{client}Blob"], record["aad"] or "", record["sealerEdPub"]
    opened = open_envelope(envelope, recipient, aad=aad, sealer=sealer)
    assert (opened.plaintext.decode(), opened.sealed_by) == (record["plaintextUtf8"], sealer)
    if aad:
        with pytest.raises(AadRequired, match=r"^aad required: "):
            open_envelope(envelope, recipient)
