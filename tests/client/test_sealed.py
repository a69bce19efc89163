"""Who can open what is sealed, and how each failure is told."""

import base64
import copy
import hashlib
from collections.abc import Collection
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clients import ISSUER, STRANGER, SUBJECT

from pysync._core import canonicalize
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import sealed
from pysync.client.sealed import Keyring, UnlockedKeyring, crypto, open_envelope, seal_envelope

NOW_S = 1_700_000_000
TRUSTED = [ISSUER.ed_pub]
WEAK_KEM = "00" * 32

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def shared(*recipients: IdentityKeys) -> Keyring:
    """A keyring of the issuer's, with these recipients."""
    return Keyring.new(ISSUER, [keys.kem_pub for keys in recipients], now_s=NOW_S)


def edited(keyring: Keyring, **members: Any) -> Keyring:
    """The keyring with members of its first epoch's last entry replaced; None: left out."""
    data = copy.deepcopy(keyring.data)
    entry = data["epochs"]["1"]["wrappedKeys"][-1]
    entry.update(members)
    for name in [name for name, value in members.items() if value is None]:
        del entry[name]
    return Keyring(data)


def flipped(text: str) -> str:
    """Base64 of the same bytes, one bit of the last being other."""
    content = bytearray(base64.b64decode(text))
    content[-1] ^= 1
    return base64.b64encode(content).decode()


@given(st.dictionaries(st.text(), values, max_size=4))
def test_every_recipient_opens_content_sealed_by_another(data: dict[str, Any]) -> None:
    keyring = shared(SUBJECT)
    written = keyring.open(ISSUER, TRUSTED).seal(data)
    assert written.keys() == {"_encrypted", "_epoch"}
    assert keyring.open(SUBJECT, TRUSTED).open(written) == data


@given(st.binary(max_size=300), st.text(max_size=20), st.data())
def test_sealed_bytes_open_whole_with_their_context_and_not_otherwise(
    plaintext: bytes, aad: str, draw: st.DataObject
) -> None:
    opened = UnlockedKeyring(1, {1: bytes(32)})
    sealed_data = opened.seal_bytes(plaintext, aad)
    assert len(sealed_data) == len(plaintext) + 32
    assert opened.open_bytes(sealed_data, aad) == plaintext
    at = draw.draw(st.integers(0, len(sealed_data) - 1))
    tampered = bytearray(sealed_data)
    tampered[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(sealed.SealedError):
        opened.open_bytes(bytes(tampered), aad)
    with pytest.raises(sealed.SealedError):
        opened.open_bytes(sealed_data[: draw.draw(st.integers(0, len(sealed_data) - 1))], aad)
    with pytest.raises(sealed.DecryptionFailed):
        opened.open_bytes(sealed_data, draw.draw(st.text(max_size=20).filter(lambda other: other != aad)))


def test_a_tampered_byte_at_any_position_of_sealed_data_fails() -> None:
    opened = UnlockedKeyring(258, {258: bytes(32)})
    sealed_data = opened.seal_bytes(b"hello", "docs/a")
    for at in range(len(sealed_data)):
        tampered = sealed_data[:at] + bytes([sealed_data[at] ^ 0x80]) + sealed_data[at + 1 :]
        expected = sealed.UnknownEpoch if at < 4 else sealed.DecryptionFailed
        with pytest.raises(expected):
            opened.open_bytes(tampered, "docs/a")


def test_a_tampered_sign_at_any_position_of_a_sealed_document_fails() -> None:
    opened = UnlockedKeyring(1, {1: bytes(32)})
    written = opened.seal({"a": 1})
    for at, sign in enumerate(written["_encrypted"]):
        other = "B" if sign == "A" else "A"
        text = written["_encrypted"][:at] + other + written["_encrypted"][at + 1 :]
        with pytest.raises((sealed.DecryptionFailed, sealed.NotSealed)):
            opened.open({**written, "_encrypted": text})


@pytest.mark.parametrize("size", [0, 4, 15, 16, 31])
def test_truncated_blobs_are_reported(size: int) -> None:
    opened = UnlockedKeyring(1, {1: bytes(32)})
    with pytest.raises(sealed.Truncated, match=r"blob shorter than its epoch\+iv header"):
        opened.open_bytes(opened.seal_bytes(b"hello")[:size])


@pytest.mark.parametrize(
    "data", [{}, {"a": 1}, {"_encrypted": None}, {"_encrypted": 1}, {"_encrypted": "*"}, {"_encrypted": "AA"}]
)
def test_an_open_document_is_not_taken_for_a_sealed_one(data: dict[str, Any]) -> None:
    with pytest.raises(sealed.NotSealed):
        UnlockedKeyring(1, {1: bytes(32)}).open(data)


@pytest.mark.parametrize("plaintext", [b"", b"[]", b"1", b"{", b"\xff"])
def test_sealed_content_must_be_an_object(plaintext: bytes) -> None:
    payload = crypto.encrypt(bytes(32), plaintext, b"1", lambda size: bytes(size))
    with pytest.raises(sealed.NotSealed):
        UnlockedKeyring(1, {1: bytes(32)}).open(
            {"_encrypted": base64.b64encode(payload).decode(), "_epoch": 1}
        )


def test_content_keys_are_not_shown() -> None:
    opened = shared().open(ISSUER, TRUSTED)
    assert repr(opened) == "OpenKeyring(epoch=1)"


def test_an_added_recipient_opens_what_was_sealed_before_it_came() -> None:
    keyring = shared()
    before = keyring.open(ISSUER, TRUSTED).seal({"a": 1})
    added = keyring.add(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    assert added.epoch == 1
    assert added.recipients == (ISSUER.kem_pub, SUBJECT.kem_pub)
    assert added.open(SUBJECT, TRUSTED).open(before) == {"a": 1}


def test_a_recipient_may_add_others_where_it_is_trusted() -> None:
    added = shared(SUBJECT).add(STRANGER.kem_pub, SUBJECT, TRUSTED, now_s=NOW_S)
    with pytest.raises(sealed.UntrustedAdder):
        added.open(STRANGER, TRUSTED)
    assert added.open(STRANGER, [SUBJECT.ed_pub]).epoch == 1


def test_a_removed_recipient_opens_what_was_before_and_nothing_after() -> None:
    keyring = shared(SUBJECT, STRANGER)
    before = keyring.open(ISSUER, TRUSTED).seal({"a": 1})
    rotated = keyring.remove(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    after = rotated.open(ISSUER, TRUSTED).seal({"a": 2})
    assert (rotated.epoch, rotated.recipients) == (2, (ISSUER.kem_pub, STRANGER.kem_pub))
    assert rotated.open(STRANGER, TRUSTED).open(after) == {"a": 2}
    assert rotated.open(STRANGER, TRUSTED).open(before) == {"a": 1}
    with pytest.raises(sealed.NotARecipient):
        rotated.open(SUBJECT, TRUSTED)
    with pytest.raises(sealed.UnknownEpoch, match=r"^No key available for epoch 2"):
        keyring.open(SUBJECT, TRUSTED).open(after)
    rejoined = rotated.add(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    assert rejoined.open(SUBJECT, TRUSTED).open(after) == {"a": 2}


def test_unknown_members_of_a_keyring_stay() -> None:
    data = {**shared(SUBJECT).data, "extra": {"x": 1}}
    data["epochs"]["1"]["note"] = "first"
    changed = Keyring(data).add(STRANGER.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    changed = changed.remove(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    assert changed.data["extra"] == {"x": 1}
    assert changed.data["epochs"]["1"]["note"] == "first"


def test_rotation_leaves_out_whom_nobody_trusted_added_and_whose_entry_is_forged() -> None:
    keyring = shared(SUBJECT)
    smuggled = keyring.add(STRANGER.kem_pub, SUBJECT, TRUSTED, now_s=NOW_S)
    third = IdentityKeys.from_private(bytes([5]) * 32, bytes([6]) * 32)
    forged = edited(smuggled.add(third.kem_pub, ISSUER, TRUSTED, now_s=NOW_S), addedAt=NOW_S + 1)
    assert len(forged.recipients) == 4
    rotated = forged.remove(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    assert rotated.recipients == (ISSUER.kem_pub,)


def test_a_recipient_of_two_entries_has_one_after_rotation() -> None:
    data = shared(SUBJECT, STRANGER).data
    entries = data["epochs"]["1"]["wrappedKeys"]
    doubled = Keyring({**data, "epochs": {"1": {"createdAt": 1, "wrappedKeys": [*entries, entries[1]]}}})
    with pytest.raises(sealed.AmbiguousEntry):
        doubled.open(SUBJECT, TRUSTED)
    rotated = doubled.remove(STRANGER.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    assert rotated.open(SUBJECT, TRUSTED).epoch == 2


@pytest.mark.parametrize(
    "members",
    [
        {"addedSig": None},
        {"addedSig": "AA=="},
        {"addedAt": NOW_S + 1},
        {"addedAt": None},
        {"addedAt": True},
        {"addedAt": 2**70},
        {"addedAt": "now"},
        {"ct": None},
        {"ct": "*"},
        {"ct": "\ud800"},
        {"ct": 1},
        {"ephKem": SUBJECT.kem_pub},
        {"ephKem": "\ud800"},
        {"ephKem": SUBJECT.kem_pub.upper()},
        {"ephKem": None},
    ],
)
def test_an_entry_that_is_not_as_it_was_signed_is_forged(members: dict[str, Any]) -> None:
    with pytest.raises(sealed.ForgedEntry):
        edited(shared(SUBJECT), **members).open(SUBJECT, TRUSTED)


def test_untrusted_adder_and_one_with_a_trusted_name_are_distinguished() -> None:
    by_unknown = Keyring.new(STRANGER, [SUBJECT.kem_pub], now_s=NOW_S)
    with pytest.raises(sealed.UntrustedAdder, match=STRANGER.ed_pub):
        by_unknown.open(SUBJECT, TRUSTED)
    with pytest.raises(sealed.ForgedEntry):
        edited(by_unknown, addedBy=ISSUER.ed_pub).open(SUBJECT, TRUSTED)
    with pytest.raises(sealed.UntrustedAdder):
        edited(by_unknown, addedBy=None).open(SUBJECT, TRUSTED)


@pytest.mark.parametrize("adder", [[], {}, True, "", "\x1b[2J", "\ud800", TRUSTED[0].upper()])
@pytest.mark.parametrize("trusted", [TRUSTED, frozenset(TRUSTED)])
def test_malformed_key_is_never_trusted(adder: Any, trusted: Collection[str]) -> None:
    broken = edited(shared(STRANGER, SUBJECT), addedBy=adder)
    with pytest.raises(sealed.UntrustedAdder, match="by nobody"):
        broken.open(SUBJECT, trusted)
    rotated = broken.remove(STRANGER.kem_pub, ISSUER, trusted, now_s=NOW_S)
    assert rotated.recipients == (ISSUER.kem_pub,)


def test_reader_without_trusted_keys_opens_nothing() -> None:
    with pytest.raises(sealed.UntrustedAdder):
        shared(SUBJECT).open(SUBJECT, [])


def test_every_keyring_epoch_and_envelope_has_a_content_key_of_its_own() -> None:
    rotated = shared(SUBJECT).remove(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    content_keys = [
        *rotated.open(ISSUER, TRUSTED).content_keys.values(),
        *shared().open(ISSUER, TRUSTED).content_keys.values(),
    ]
    for _ in range(2):
        entry = seal_envelope(b"", SUBJECT.kem_pub, ISSUER, now_s=NOW_S)["entry"]
        content_keys.append(crypto.unwrap_key(entry, SUBJECT))
    assert len({*content_keys, bytes(32)}) == 6


def test_recipient_named_twice_is_in_a_new_keyring_once() -> None:
    keyring = shared(SUBJECT, ISSUER, SUBJECT)
    assert keyring.recipients == (ISSUER.kem_pub, SUBJECT.kem_pub)


def test_a_small_order_key_adds_nobody() -> None:
    weak = "01" + "00" * 31
    with pytest.raises(sealed.ForgedEntry):
        edited(shared(SUBJECT), addedBy=weak).open(SUBJECT, [weak])


def test_an_entry_moved_to_another_epoch_is_forged() -> None:
    data = shared(SUBJECT).data
    moved = {**data, "currentEpoch": 2, "epochs": {"2": data["epochs"]["1"]}}
    with pytest.raises(sealed.ForgedEntry):
        Keyring(moved).open(SUBJECT, TRUSTED)


@pytest.mark.parametrize(
    ("ct", "error"),
    [(bytes(60), sealed.DecryptionFailed), (bytes(12), sealed.Truncated), (b"", sealed.Truncated)],
)
def test_wrapped_key_that_does_not_open_is_reported(ct: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        signed_entry(ct=base64.b64encode(ct).decode()).open(SUBJECT, TRUSTED)


def test_a_wrapped_key_of_another_size_and_one_of_a_weak_key_do_not_open() -> None:
    short = crypto.wrap_key(bytes(16), SUBJECT.kem_pub, 1, ISSUER, now_s=NOW_S, random=hashes())
    with pytest.raises(sealed.DecryptionFailed, match="32 bytes"):
        signed_entry(**short).open(SUBJECT, TRUSTED)
    with pytest.raises(sealed.ForgedEntry):
        signed_entry(addedAt=True).open(SUBJECT, TRUSTED)
    with pytest.raises(sealed.DecryptionFailed, match="weak"):
        signed_entry(ephKem=WEAK_KEM).open(SUBJECT, TRUSTED)


def hashes() -> crypto.Random:
    return lambda size: hashlib.shake_128(b"%d" % size).digest(size)


def signed_entry(**members: Any) -> Keyring:
    """A keyring whose entry for the subject has these members, rightly signed."""
    keyring = shared(SUBJECT)
    data = copy.deepcopy(keyring.data)
    entry = data["epochs"]["1"]["wrappedKeys"][-1]
    entry.update(members)
    signed = {name: entry[name] for name in ("addedAt", "addedBy", "ct", "ephKem", "subKem")}
    entry["addedSig"] = ISSUER.sign(canonicalize(orjson.dumps(signed | {"epoch": 1})))
    return Keyring(data)


def test_an_earlier_epoch_that_does_not_open_hinders_nobody() -> None:
    rotated = shared(SUBJECT, STRANGER).remove(STRANGER.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    data = copy.deepcopy(rotated.data)
    data["epochs"]["1"]["wrappedKeys"] = [1, {}, {"subKem": SUBJECT.kem_pub}]
    data["epochs"] |= {"0": 1, "x": {}, "4294967296": {"wrappedKeys": []}, "3": {"wrappedKeys": 1}}
    opened = Keyring(data).open(SUBJECT, TRUSTED)
    assert (opened.epoch, set(opened.content_keys)) == (2, {2})


def test_a_keyring_before_the_latest_that_was_seen_is_rejected() -> None:
    keyring = shared(SUBJECT, STRANGER)
    rotated = keyring.remove(STRANGER.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    assert rotated.open(SUBJECT, TRUSTED, min_epoch=2).epoch == 2
    with pytest.raises(sealed.KeyringRolledBack):
        keyring.open(SUBJECT, TRUSTED, min_epoch=2)
    with pytest.raises(sealed.KeyringRolledBack):
        keyring.add(IdentityKeys.generate().kem_pub, ISSUER, TRUSTED, now_s=NOW_S, min_epoch=2)
    with pytest.raises(sealed.KeyringRolledBack):
        keyring.remove(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S, min_epoch=2)


def test_duplicate_and_missing_recipients_are_reported() -> None:
    keyring = shared(SUBJECT)
    with pytest.raises(sealed.AlreadyPresent, match="already present"):
        keyring.add(SUBJECT.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    with pytest.raises(sealed.NotARecipient):
        keyring.remove(STRANGER.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)
    with pytest.raises(sealed.NotARecipient):
        keyring.open(STRANGER, TRUSTED)
    with pytest.raises(sealed.NotARecipient):
        keyring.add(STRANGER.kem_pub, STRANGER, TRUSTED, now_s=NOW_S)
    with pytest.raises(sealed.LastRecipient):
        shared().remove(ISSUER.kem_pub, ISSUER, TRUSTED, now_s=NOW_S)


@pytest.mark.parametrize(
    "key", ["", "x", "00" * 31, SUBJECT.kem_pub.upper(), SUBJECT.kem_pub + "\n", WEAK_KEM]
)
def test_a_recipient_is_a_good_public_key(key: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whichever library finds it
        shared().add(key, ISSUER, TRUSTED, now_s=NOW_S)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"v": 1},
        {"v": 2, "currentEpoch": 1, "epochs": {"1": {"wrappedKeys": []}}},
        {"v": 1, "currentEpoch": 1, "epochs": []},
        {"v": 1, "currentEpoch": 1, "epochs": {}},
        {"v": 1, "currentEpoch": 1, "epochs": {"01": {"wrappedKeys": []}}},
        {"v": 1, "currentEpoch": 1, "epochs": {"1": {"wrappedKeys": {}}}},
        {"v": 1, "currentEpoch": 2, "epochs": {"1": {"wrappedKeys": []}}},
        {"v": 1, "currentEpoch": "1", "epochs": {"1": {"wrappedKeys": []}}},
        {"v": 1, "currentEpoch": True, "epochs": {"1": {"wrappedKeys": []}}},
        {"v": 1, "currentEpoch": 0, "epochs": {"0": {"wrappedKeys": []}}},
        {"v": 1, "currentEpoch": 2**32, "epochs": {str(2**32): {"wrappedKeys": []}}},
    ],
)
def test_malformed_keyring_is_reported(data: dict[str, Any]) -> None:
    with pytest.raises(sealed.MalformedKeyring):
        Keyring(data)


@given(st.binary(max_size=200), st.text(max_size=10))
def test_envelope_opens_for_its_recipient_and_names_its_sealer(plaintext: bytes, aad: str) -> None:
    envelope = seal_envelope(plaintext, SUBJECT.kem_pub, ISSUER, aad=aad, now_s=NOW_S)
    assert ("v" in envelope) == bool(aad)
    assert open_envelope(envelope, SUBJECT, aad=aad) == (plaintext, ISSUER.ed_pub)


def test_an_envelope_opens_for_nobody_else_and_not_otherwise() -> None:
    envelope = seal_envelope(b"hello", SUBJECT.kem_pub, ISSUER, aad="ctx", now_s=NOW_S)
    entry = envelope["entry"]
    with pytest.raises(sealed.AadRequired, match=r"^aad required"):
        open_envelope(envelope, SUBJECT)
    with pytest.raises(sealed.DecryptionFailed):
        open_envelope(envelope, SUBJECT, aad="other")
    with pytest.raises(sealed.DecryptionFailed):
        open_envelope(envelope, STRANGER, aad="ctx")
    with pytest.raises(sealed.DecryptionFailed):
        open_envelope({**envelope, "ct": flipped(envelope["ct"])}, SUBJECT, aad="ctx")
    with pytest.raises(sealed.UntrustedAdder):
        open_envelope(envelope, SUBJECT, aad="ctx", sealer=STRANGER.ed_pub)
    taken = {**envelope, "entry": {**entry, "addedBy": STRANGER.ed_pub}}
    with pytest.raises(sealed.ForgedEntry):
        open_envelope(taken, SUBJECT, aad="ctx", sealer=STRANGER.ed_pub)
    with pytest.raises(sealed.Truncated, match=r"^Encrypted payload is too short"):
        open_envelope({**envelope, "ct": "AAAA"}, SUBJECT, aad="ctx")
    with pytest.raises(sealed.DecryptionFailed):
        open_envelope({**envelope, "v": 2}, SUBJECT)
    for broken in ({**envelope, "entry": 1}, {**envelope, "ct": "*"}, {**envelope, "ct": None}):
        with pytest.raises(sealed.NotSealed):
            open_envelope(broken, SUBJECT, aad="ctx")


@pytest.mark.parametrize("name", ["subKem", "ephKem", "ct", "addedBy", "addedSig", "addedAt"])
@pytest.mark.parametrize("value", [None, [], "", 1.5])
def test_an_envelope_whose_entry_is_none_is_forged(name: str, value: Any) -> None:
    envelope = seal_envelope(b"hello", SUBJECT.kem_pub, ISSUER, now_s=NOW_S)
    entry = envelope["entry"] | {name: value}
    missing = {other: member for other, member in entry.items() if other != name}
    for broken in (entry, missing):
        with pytest.raises(sealed.ForgedEntry):
            open_envelope({**envelope, "entry": broken}, SUBJECT)
