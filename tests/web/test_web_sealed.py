"""What a page seals, and whom it lets open it, is what the other clients of the protocol make of it."""

import json
from typing import Any

import pytest
import pytest_asyncio
from support.browser import Chromium, Window
from support.clients import Start
from support.collections import collection
from support.configurations import ROOT
from support.web_pages import blank_page, web_service

from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client, SyncDocument, sealed
from pysync.client.sealed import Keyring, RemoteKeyring, UnlockedKeyring, open_envelope, seal_envelope

VECTORS: dict[str, Any] = json.loads((ROOT / "tests/vectors/protocol.json").read_text())
DELEGATED = VECTORS["delegated_envelope"]
SECTIONS = ("keyring_wrap", "delegated_envelope", "sealed_blob", "seal_envelope")
PYTHON, OTHER = IdentityKeys.from_private(b"\x11" * 32, b"\x21" * 32), IdentityKeys.generate()
NOW_S = 1_700_000_000

# Functions for the expressions of this module. `known` has the browser give these values, in hex, where it
# would give random ones.
SETUP = """
  const { IdentityKeys, Keyring, RemoteKeyring, SyncDocument } = pysync
  const bytes = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16))
  const inHex = (array) => Array.from(array, (byte) => byte.toString(16).padStart(2, "0")).join("")
  const same = (one, other) => pysync.canonicalJson(one) === pysync.canonicalJson(other)
  const failure = (promise) => Promise.resolve(promise).then(() => "none", (error) => (
    error instanceof pysync.SealedError ? `${error.name}: ${error.message}` : error.name))
  const pair = async (secret) => {
    const pkcs8 = bytes("302e020100300506032b656e04220420" + secret)
    const privateKey = await crypto.subtle.importKey("pkcs8", pkcs8, "X25519", true, ["deriveBits"])
    const { kty, crv, x } = await crypto.subtle.exportKey("jwk", privateKey)
    const publicKey = await crypto.subtle.importKey("jwk", { kty, crv, x }, "X25519", true, [])
    return { privateKey, publicKey }
  }
  const known = (values, ephemeral) => {
    crypto.getRandomValues = (array) => {
      const at = values.findIndex((value) => value.length === 2 * array.length)
      array.set(bytes(values.splice(at, 1)[0]))
      return array
    }
    const { generateKey } = SubtleCrypto.prototype
    crypto.subtle.generateKey = (name, ...rest) => (
      name === "X25519" && ephemeral ? pair(ephemeral) : generateKey.call(crypto.subtle, name, ...rest))
  }
  Object.assign(window, { bytes, inHex, same, failure, known })
  Object.assign(window, { IdentityKeys, Keyring, RemoteKeyring, SyncDocument })
"""


@pytest_asyncio.fixture
async def base(start: Start) -> str:
    rooms = collection("rooms", encryption="delegated")
    keyrings = collection("keyrings", "rooms/{id}/_keyring")
    files = collection("files", allowedMimeTypes=["application/octet-stream"])
    return await web_service(start, rooms, keyrings, files)


@pytest_asyncio.fixture
async def window(screen: Chromium, base: str) -> Window:
    return await opened(screen, base)


async def opened(screen: Chromium, base: str) -> Window:
    window = await blank_page(screen, base)
    await window.run(f"{{ {SETUP} window.client = new pysync.Client(location.origin) }}")
    return window


async def test_keys_are_wrapped_and_unwrapped_as_in_the_vectors(window: Window) -> None:
    unwrapped = """async ({ epoch, recipientKemPriv, expected: { entry } }, sealed) => {
      const recipient = await IdentityKeys.fromPrivate("09".repeat(32), recipientKemPriv)
      const ring = (at) => new Keyring({ v: 1, currentEpoch: at, epochs: { [at]: { wrappedKeys: [entry] } } })
      const { length } = await failure(ring(epoch + 1).open(recipient, [entry.addedBy]).then(() => ""))
      return [await (await ring(epoch).open(recipient, [entry.addedBy])).open(sealed), length > 0]
    }"""
    made = """async (record) => {
      const { recipientKemPub, addedAt, epoch } = record
      const adder = await IdentityKeys.fromPrivate(record.adderEdPriv, record.recipientKemPriv)
      known([record.cek, record.iv, "00".repeat(12)], record.ephemeralPriv)
      if (epoch) return (await Keyring.create(adder, [], addedAt)).data.epochs[1].wrappedKeys[0]
      Date.now = () => 1000 * addedAt
      return (await pysync.sealEnvelope(new Uint8Array(), recipientKemPub, adder)).entry
    }"""
    epochs = {record["epoch"]: record for record in VECTORS["keyring_wrap"]}
    for epoch in sorted(epochs.keys() - {0}):
        keys = UnlockedKeyring(epoch, {epoch: bytes.fromhex(epochs[epoch]["cek"])})
        assert await window.run(unwrapped, epochs[epoch], keys.seal({"n": epoch})) == [{"n": epoch}, True]
    for epoch in (1, 0):
        assert await window.run(made, epochs[epoch]) == epochs[epoch]["expected"]["entry"]


async def test_documents_files_and_envelopes_are_those_of_the_vectors(window: Window) -> None:
    script = """async (text) => {
      const { delegated_envelope: { keyring, cases }, sealed_blob, seal_envelope } = JSON.parse(text)
      const me = await IdentityKeys.fromPrivate("11".repeat(32), keyring.recipient.kemPriv)
      const opened = await new Keyring(keyring.document).open(me, keyring.trustedAdders)
      const byId = Object.fromEntries(cases.map((each) => [each.id, each]))
      const wrong = []
      const expect = (id, isRight) => isRight || wrong.push(id)

      const { data, iv, python, typescript } = byId.unicode
      known([iv])
      expect("sealed", same(await opened.seal(data), typescript))
      expect("opened", same([await opened.open(python), await opened.open(typescript)], [data, data]))
      const missing = byId["epoch-missing-uses-current"]
      for (const _epoch of [undefined, "1", 1.5, true, null, []]) {
        expect(`epoch ${_epoch}`, same(await opened.open({ ...missing.payload, _epoch }), missing.python))
      }
      for (const [id, start] of [["epoch-flipped", "DecryptionFailed: Decryption failed"],
        ["unknown-epoch", "UnknownEpoch: No key available for epoch 9"],
        ["too-short", "Truncated: Encrypted payload is too short"]]) {
        expect(id, (await failure(opened.open(byId[id].payload))).startsWith(start))
      }
      for (const { id, plaintextHex, aad, iv, expected } of sealed_blob.cases) {
        known([iv])
        const blob = await opened.sealBytes(bytes(plaintextHex), aad ?? "")
        expect(id, inHex(blob) === expected.blobHex)
        expect(id, inHex(await opened.openBytes(blob, aad ?? "")) === expected.opened)
        expect(id, (await failure(opened.openBytes(blob, `${aad}x`))).startsWith("DecryptionFailed"))
      }
      for (const { id, plaintextUtf8, recipientKemPriv, sealerEdPub: sealer, ...record } of seal_envelope) {
        const aad = record.aad ?? ""
        const recipient = await IdentityKeys.fromPrivate("09".repeat(32), recipientKemPriv)
        for (const envelope of [record.pythonBlob, record.typescriptBlob]) {
          const { plaintext, sealedBy } = await pysync.openEnvelope(envelope, recipient, { aad, sealer })
          expect(id, new TextDecoder().decode(plaintext) === plaintextUtf8 && sealedBy === sealer)
          const failed = await failure(pysync.openEnvelope(envelope, recipient))
          expect(id, failed.startsWith(aad ? "AadRequired: aad" : "none"))
        }
      }
      return wrong
    }"""
    assert await window.run(script, json.dumps({name: VECTORS[name] for name in SECTIONS})) == []


async def test_page_and_python_share_what_the_server_cannot_read(window: Window, base: str) -> None:
    created = """async (python) => {
      window.me = await IdentityKeys.generate()
      window.ring = new RemoteKeyring(client, "rooms/a", me, [me.edPub, python.edPub])
      window.keys = await ring.create([python.kemPub])
      window.doc = new SyncDocument(client, "rooms/a", { sealing: keys })
      await doc.push({ title: "é", rows: [{ id: 1 }] })
      return [me.edPub, me.kemPub]
    }"""
    page_ed, page_kem = await window.run(created, {"edPub": PYTHON.ed_pub, "kemPub": PYTHON.kem_pub})
    async with Client(base) as client:
        ring = RemoteKeyring(client, "rooms/a", PYTHON, [page_ed, PYTHON.ed_pub])
        keys = await ring.open()
        document = SyncDocument(client, "rooms/a", sealing=keys)
        assert await document.pull() == {"title": "é", "rows": [{"id": 1}]}
        document.data["rows"].append({"id": 2})
        await document.push()
        await window.run("{ doc.data.title = 'y'; doc.push() }")
        merged = {"title": "y", "rows": [{"id": 1}, {"id": 2}]}
        assert await window.run("doc.data") == await document.pull() == merged
        stored = (await client.pull("rooms/a")).data
        assert set(stored) == {"_encrypted", "_epoch"}

        # Python lets somebody in, the page puts them out again.
        assert (await ring.add(OTHER.kem_pub)).epoch == 1
        removing = "(kem) => ring.remove(kem).then(({ epoch }) => [epoch, ring.minEpoch])"
        assert await window.run(removing, OTHER.kem_pub) == [2, 2]
        recipients = await window.run("ring.read().then(({ recipients }) => recipients)")
        assert recipients == [page_kem, PYTHON.kem_pub]
        newer = "async () => { doc = new SyncDocument(client, 'rooms/a', { sealing: await ring.open() }) }"
        await window.run(f"({newer})()")
        await window.run("doc.update((data) => ({ ...data, secret: true }))")
        with pytest.raises(sealed.UnknownEpoch):
            await document.pull()
        document = SyncDocument(client, "rooms/a", sealing=await ring.open())
        await document.update(lambda data: {**data, "n": 1})
        assert await window.run("doc.pull()") == {**merged, "secret": True, "n": 1}
        outsider = RemoteKeyring(client, "rooms/a", OTHER, [page_ed, PYTHON.ed_pub])
        with pytest.raises(sealed.NotARecipient):
            await outsider.open()


async def test_files_open_on_the_other_side_and_only_as_what_they_are(window: Window, base: str) -> None:
    script = """async (python) => {
      window.me = await IdentityKeys.generate()
      window.keys = await new RemoteKeyring(client, "rooms/a", me, [me.edPub]).create([python])
      const plaintext = Uint8Array.from({ length: 100_000 }, (_, at) => at % 251)
      await pysync.sealAndPushBlob(client, keys, "files/a", plaintext.buffer)
      await pysync.sealAndPushBlob(client, keys, "files/b", plaintext.subarray(7, 9), "context")
      return me.edPub
    }"""
    page = await window.run(script, PYTHON.kem_pub)
    async with Client(base) as client:
        keys = await RemoteKeyring(client, "rooms/a", PYTHON, [page]).open()
        plaintext = bytes(at % 251 for at in range(100_000))
        assert await sealed.pull_and_open_blob(client, keys, "files/a") == plaintext
        assert await sealed.pull_and_open_blob(client, keys, "files/b", aad="context") == plaintext[7:9]
        await sealed.seal_and_push_blob(client, keys, "files/c", b"from Python")
    read = """async (key, aad) => {
      const plaintext = await pysync.pullAndOpenBlob(client, keys, key, aad ?? undefined)
      return plaintext && new TextDecoder().decode(plaintext)
    }"""
    assert await window.run(read, "files/c", None) == "from Python"
    assert await window.run(read, "files/none", None) is None
    assert await window.run("failure(pysync.pullAndOpenBlob(client, keys, 'files/c', 'x'))") == (
        "DecryptionFailed: Decryption failed: other bytes, context or epoch"
    )


async def test_envelopes_open_on_the_other_side(window: Window) -> None:
    for aad in ("", "ctx:é"):
        made = """async (recipient, aad) => {
          window.me = await IdentityKeys.generate()
          const plaintext = new TextEncoder().encode("é")
          return [me.edPub, me.kemPub, await pysync.sealEnvelope(plaintext, recipient, me, aad)]
        }"""
        page_ed, page_kem, envelope = await window.run(made, PYTHON.kem_pub, aad)
        assert open_envelope(envelope, PYTHON, aad=aad, sealer=page_ed) == ("é".encode(), page_ed)
        assert ("v" in envelope) is bool(aad)
        opened = """async (envelope, aad, sealer) => {
          const { plaintext, sealedBy } = await pysync.openEnvelope(envelope, me, { aad, sealer })
          return [new TextDecoder().decode(plaintext), sealedBy]
        }"""
        envelope = seal_envelope("ö".encode(), page_kem, PYTHON, aad=aad, now_s=NOW_S)
        assert await window.run(opened, envelope, aad, PYTHON.ed_pub) == ["ö", PYTHON.ed_pub]
        failed = "(envelope, aad, sealer) => failure(pysync.openEnvelope(envelope, me, { aad, sealer }))"
        for changed, sealer, name in [
            (envelope, OTHER.ed_pub, "UntrustedAdder"),
            ({**envelope, "ct": "AAAA"}, PYTHON.ed_pub, "Truncated"),
            ({**envelope, "ct": "!"}, PYTHON.ed_pub, "NotSealed"),
            ({**envelope, "entry": None}, PYTHON.ed_pub, "NotSealed"),
            ({**envelope, "entry": {**envelope["entry"], "addedAt": 1}}, PYTHON.ed_pub, "ForgedEntry"),
            ({**envelope, "entry": {**envelope["entry"], "ct": 1}}, None, "ForgedEntry"),
            (seal_envelope(b"", OTHER.kem_pub, PYTHON, aad=aad, now_s=NOW_S), None, "DecryptionFailed"),
        ]:
            assert (await window.run(failed, changed, aad, sealer)).split(":")[0] == name


async def test_what_is_not_sealed_or_was_tampered_with_does_not_open(window: Window) -> None:
    script = """async () => {
      const me = await IdentityKeys.generate()
      const keys = await (await Keyring.create(me)).open(me, [me.edPub])
      const sealed = await keys.seal({ n: 1 }), blob = await keys.sealBytes(bytes("010203"), "a")
      const names = new Set()
      const note = async (promise) => names.add((await failure(promise)).split(":")[0])
      for (let at = 4; at < blob.length; at++) {
        await note(keys.openBytes(blob.map((byte, here) => (here === at ? byte ^ 1 : byte)), "a"))
      }
      const flipped = [...names]
      const others = []
      for (const data of [{}, { n: 1 }, { _encrypted: 1 }, { _encrypted: "*" }, { _encrypted: null }]) {
        others.push((await failure(keys.open(data))).split(":")[0])
      }
      const list = await keys.sealBytes(bytes("00"))
      return [flipped, new Set(others).size, others[0],
        await failure(keys.openBytes(blob.subarray(0, 31), "a")),
        (await failure(keys.openBytes(list.map((byte, at) => (at === 3 ? 2 : byte))))).split(":")[0],
        await failure(keys.seal({ n: NaN })), await keys.open(sealed)]
    }"""
    assert await window.run(f"({script})()") == [
        ["DecryptionFailed"],
        1,
        "NotSealed",
        "Truncated: sealed blob shorter than its epoch+iv header",
        "UnknownEpoch",
        "RangeError",
        {"n": 1},
    ]


async def test_list_that_was_sealed_is_no_document(window: Window) -> None:
    keys = UnlockedKeyring(2, {2: bytes.fromhex(DELEGATED["keyring"]["ceks"]["2"])})
    recipient = DELEGATED["keyring"]["recipient"]["kemPriv"]
    opening = """async (kemPriv, { document, trustedAdders }, sealed) => {
      const me = await IdentityKeys.fromPrivate("11".repeat(32), kemPriv)
      const keys = await new Keyring(document).open(me, trustedAdders)
      return failure(keys.open(sealed))
    }"""
    for plaintext in ([1], "text", None, 1):
        payload = keys.seal(plaintext)  # type: ignore[arg-type]
        failed = await window.run(opening, recipient, DELEGATED["keyring"], payload)
        assert failed == "NotSealed: it is no JSON object"


async def test_changes_of_a_keyring_keep_the_rules(window: Window) -> None:
    script = """async () => {
      const [me, friend, guest] = await Promise.all([1, 2, 3].map(() => IdentityKeys.generate()))
      const trusted = [me.edPub], names = []
      const note = async (promise) => names.push((await failure(promise)).split(":")[0])
      const first = await Keyring.create(me, [friend.kemPub, friend.kemPub, me.kemPub], 5)
      const sealed = await (await first.open(me, trusted)).seal({ n: 1 })
      const more = await first.add(me, guest.kemPub, trusted, { nowS: 6 })
      const fewer = await more.remove(me, guest.kemPub, trusted, { nowS: 7 })
      const later = await (await fewer.open(friend, trusted)).seal({ n: 2 })

      await note(first.add(me, friend.kemPub, trusted)) // AlreadyPresent
      await note(first.remove(me, guest.kemPub, trusted)) // NotARecipient
      await note(fewer.open(guest, trusted)) // NotARecipient
      await note(fewer.remove(me, friend.kemPub, [])) // LastRecipient
      await note(first.open(me, [friend.edPub])) // UntrustedAdder
      await note(first.open(me, [])) // UntrustedAdder
      await note(first.open(me, trusted, 2)) // KeyringRolledBack
      await note(first.add(me, guest.kemPub, trusted, { minEpoch: 2 })) // KeyringRolledBack
      await note(first.remove(me, friend.kemPub, trusted, { minEpoch: 2 })) // KeyringRolledBack
      await note(Keyring.create(me, ["x"])) // TypeError
      await note(first.add(me, "00".repeat(32), trusted)) // TypeError, of a weak key
      const twice = structuredClone(first.data)
      twice.epochs[1].wrappedKeys.push(twice.epochs[1].wrappedKeys[0])
      await note(new Keyring(twice).open(me, trusted)) // AmbiguousEntry
      const forged = structuredClone(first.data)
      forged.epochs[1].wrappedKeys[0].addedAt += 1
      await note(new Keyring(forged).open(me, trusted)) // ForgedEntry

      const opened = await fewer.open(friend, trusted)
      return [names, first.recipients.length, more.recipients.at(-1) === guest.kemPub, fewer.epoch,
        fewer.recipients, [me.kemPub, friend.kemPub], await opened.open(sealed), await opened.open(later),
        await (await more.open(guest, trusted)).open(sealed),
        [first, fewer].map(({ data, epoch }) => data.epochs[epoch].createdAt),
        (await (await new Keyring({ ...first.data, more: 1 }).add(me, guest.kemPub, trusted)).data.more)]
    }"""
    result = await window.run(f"({script})()")
    names, count, is_last, epoch, recipients, expected, before, after, by_guest, times, more = result
    assert names == [
        "AlreadyPresent",
        "NotARecipient",
        "NotARecipient",
        "LastRecipient",
        "UntrustedAdder",
        "UntrustedAdder",
        "KeyringRolledBack",
        "KeyringRolledBack",
        "KeyringRolledBack",
        "TypeError",
        "TypeError",
        "AmbiguousEntry",
        "ForgedEntry",
    ]
    assert (count, is_last, epoch, recipients) == (2, True, 2, expected)
    assert (before, after, by_guest, times, more) == ({"n": 1}, {"n": 2}, {"n": 1}, [5, 7], 1)


async def test_rotation_leaves_out_whom_nobody_trusted_added(window: Window) -> None:
    """And whose entry is forged."""
    mine = Keyring.new(PYTHON, now_s=NOW_S)
    theirs = Keyring.new(OTHER, now_s=NOW_S).data["epochs"]["1"]["wrappedKeys"]
    third, fourth = IdentityKeys.generate(), IdentityKeys.generate()
    data = mine.add(third.kem_pub, PYTHON, [PYTHON.ed_pub], now_s=NOW_S)
    data = data.add(fourth.kem_pub, PYTHON, [PYTHON.ed_pub], now_s=NOW_S)
    keyring = json.loads(json.dumps(data.data))
    entries = keyring["epochs"]["1"]["wrappedKeys"]
    entries[2]["addedAt"] += 1
    entries += [*theirs, "no entry", {}]
    script = """async (data, kem, trusted, ed) => {
      const me = await IdentityKeys.fromPrivate(ed, "21".repeat(32))
      const rotated = await new Keyring(data).remove(me, kem, [trusted])
      return rotated.recipients
    }"""
    removed = await window.run(script, keyring, third.kem_pub, PYTHON.ed_pub, PYTHON.ed_priv)
    assert removed == [PYTHON.kem_pub]


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"currentEpoch": 2},
        {"currentEpoch": "1"},
        {"currentEpoch": True},
        {"epochs": []},
        {"epochs": None},
        {"epochs": {"01": {"wrappedKeys": []}}},
        {"epochs": {"1": {"wrappedKeys": {}}}},
        {"epochs": {"1": None}},
    ],
)
async def test_malformed_keyring_is_reported(window: Window, change: dict[str, Any]) -> None:
    data = {**Keyring.new(PYTHON, now_s=NOW_S).data, **change}
    made = "(data) => failure((async () => new Keyring(data))())"
    assert await window.run(made, data) == "MalformedKeyring: this is no keyring"


async def test_keyrings_of_a_server_are_made_once_and_changed_by_two_windows(
    window: Window, screen: Chromium, base: str
) -> None:
    other = await opened(screen, base)
    ring = """async (kemPriv) => {
      window.me = await IdentityKeys.fromPrivate("11".repeat(32), kemPriv)
      window.ring = new RemoteKeyring(client, "/pull/rooms/a", me, [me.edPub])
    }"""
    for each in (window, other):
        await each.run(ring, PYTHON.kem_priv)
    assert await window.run("failure(ring.open())") == "KeyringMissing: no keyring at rooms/a/_keyring"
    assert (await window.run("failure(ring.add(me.kemPub))")).startswith("KeyringMissing")
    await window.run("ring.create()")
    assert await other.run("failure(ring.create())") == "Conflict"
    kems = [IdentityKeys.generate().kem_pub for _ in range(4)]
    adding = "(kems) => Promise.all(kems.map((kem) => ring.add(kem))).then(() => null)"
    await window.run(f"{{ window.adding = ({adding})({json.dumps(kems[:2])}); null }}")
    await other.run(adding, kems[2:])
    await window.run("adding")
    recipients = await other.run("ring.read().then(({ recipients }) => recipients)")
    assert sorted(recipients) == sorted([PYTHON.kem_pub, *kems])
    assert (await other.run("(kem) => failure(ring.remove(kem))", PYTHON.kem_pub)).startswith("NotARecipient")
    await other.run("(kem) => ring.remove(kem).then(() => null)", kems[0])
    assert await window.run("(kem) => ring.remove(kem).then(({ epoch }) => epoch)", kems[1]) == 3
    older = """async (data) => {
      await client.push("rooms/a/_keyring", data, (await client.pull("rooms/a/_keyring")).hash)
    }"""
    await window.run(older, Keyring.new(PYTHON, now_s=NOW_S).data)
    assert (await window.run("failure(ring.open())")).startswith("KeyringRolledBack")


async def test_server_gets_nothing_in_unsealed(window: Window, base: str) -> None:
    script = """async () => {
      const me = await IdentityKeys.generate()
      window.keys = await (await Keyring.create(me)).open(me, [me.edPub])
      window.doc = new SyncDocument(client, "rooms/a", { sealing: keys })
      await doc.push({ n: 1 })
      window.before = doc.dump()
    }"""
    await window.run(f"({script})()")
    async with Client(base) as client:
        await client.push("rooms/a", {"n": 2}, (await client.pull("rooms/a")).hash)
    for act in ("doc.pull()", "doc.push({ n: 3 })", "doc.update((data) => ({ n: 4 }))"):
        assert (await window.run(f"failure({act})")).startswith("NotSealed")
    assert await window.run("doc.dump().base") == {"n": 1}
    nothing = """(body) => {
      const fetch = async () => new Response(body, { headers: { "Content-Type": "application/json" } })
      const lying = new pysync.Client(location.origin, { fetch })
      return failure(new SyncDocument(lying, "rooms/a", { sealing: keys }).pull())
    }"""
    body = json.dumps({"data": {"n": 5}, "hash": "", "timestamp": 1})
    assert (await window.run(nothing, body)).startswith("NotSealed")
