"""The keys of the browser client stay in their browser, and certificates have the form of the protocol."""

import pytest
from support.browser import Chromium
from support.clients import Start
from support.collections import NOTES
from support.web_pages import blank_page, client_page, do, web_service

from pysync._core import PublicKey
from pysync.auth.certificates import user_id


async def test_keys_are_those_of_the_browser_under_a_name(
    start: Start, screen: Chromium, other_screen: Chromium
) -> None:
    base = await web_service(start)
    pair = "Promise.all([IdentityKeys.open(), IdentityKeys.open(), IdentityKeys.open('work')])"
    shown = f"{pair}.then((all) => all.map((keys) => ({{...keys}})))"
    windows = [await client_page(each, base) for each in (screen, screen, other_screen)]
    mine, again, others = [await window.run(shown) for window in windows]
    assert mine == again
    assert mine[0] == mine[1] != mine[2]
    assert {keys["edPub"] for keys in mine}.isdisjoint(keys["edPub"] for keys in others)
    assert all(keys["userId"] == user_id(keys["edPub"]) for keys in mine)


async def test_keys_are_on_the_disk_before_they_are_used(start: Start, screen: Chromium) -> None:
    before = """window.durabilities = []
    const begin = IDBDatabase.prototype.transaction
    IDBDatabase.prototype.transaction = function (...values) {
      const transaction = begin.apply(this, values)
      durabilities.push(transaction.durability)
      return transaction
    }"""
    window = await client_page(screen, await web_service(start), before)
    assert await window.run("durabilities") == ["strict"]


async def test_keys_that_are_forgotten_are_not_there_any_more(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const work = await IdentityKeys.open("work")
        await IdentityKeys.forget()
        await IdentityKeys.forget("unknown")
        const other = await IdentityKeys.open(), again = await IdentityKeys.open("work")
        return [other.userId === me.userId, again.userId === work.userId]""",
    )
    assert shown == [False, True]


async def test_private_keys_cannot_be_extracted(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const opening = indexedDB.open("pysync-keys"), found = []
        await new Promise((resolve) => { opening.onsuccess = resolve })
        const reading = opening.result.transaction("keys").objectStore("keys").getAll()
        await new Promise((resolve) => { reading.onsuccess = resolve })
        for (const key of reading.result.flatMap(Object.values).map(([key]) => key)) {
          const exported = await crypto.subtle.exportKey("pkcs8", key).catch(({name}) => name)
          found.push([key.algorithm.name, key.extractable, exported])
        }
        const shown = JSON.stringify([me, await IdentityKeys.fromPrivate("11".repeat(32), "31".repeat(32))])
        const members = JSON.parse(shown).map((keys) => Object.keys(keys).sort())
        return [found, shown.includes("11111111"), members]""",
    )
    names = ["edPub", "kemPub", "userId"]
    error = "InvalidAccessError"
    assert shown == [[["Ed25519", False, error], ["X25519", False, error]], False, [names, names]]


OLD_FIREFOX = """
const refuse = (value) => {
  if ([value, value.Ed25519?.[0]].some((each) => each?.algorithm?.name === "Ed25519")) {
    throw new DOMException("The object could not be cloned.", "DataCloneError")
  }
}
const {structuredClone: clone} = window, {put, add} = IDBObjectStore.prototype
window.structuredClone = (value) => (refuse(value), clone(value))
IDBObjectStore.prototype.put = function (...values) { refuse(values[0]); return put.apply(this, values) }
IDBObjectStore.prototype.add = function (...values) { refuse(values[0]); return add.apply(this, values) }
"""
"""Runs before the page: a browser that stores no Ed25519 keys."""
WEBKIT = """
const read = (value) => (
  [value, value?.X25519?.[0]].some((each) => each?.algorithm?.name === "X25519") ? null : value)
const {structuredClone: clone} = window
const {get: resultOf} = Object.getOwnPropertyDescriptor(IDBRequest.prototype, "result")
window.structuredClone = (value) => read(clone(value))
Object.defineProperty(IDBRequest.prototype, "result", {get() { return read(resultOf.call(this)) }})
"""
"""Runs before the page: a browser that stores X25519 keys, and does not read back what has one."""
WATCHED = """
const found = window.used = []
for (const name of ["sign", "deriveBits"]) {
  const call = SubtleCrypto.prototype[name]
  SubtleCrypto.prototype[name] = function (algorithm, key, value) {
    found.push([key.algorithm.name, key.extractable])
    return call.call(this, algorithm, key, value)
  }
}
"""
"""Runs before the page: `used` are the private keys that are used, and whether they can be extracted."""
USE_KEYS = """const bytes = new TextEncoder().encode("é")
const envelope = $[0] ?? await sealEnvelope(bytes, me.kemPub, me)
const {plaintext} = await openEnvelope(envelope, me)
return [{...me}, await me.sign(bytes), envelope, new TextDecoder().decode(plaintext), used]"""


@pytest.mark.parametrize("before", [OLD_FIREFOX, WEBKIT, ""])
async def test_keys_that_a_browser_cannot_store_are_the_same_when_they_are_opened_again(
    start: Start, screen: Chromium, before: str
) -> None:
    base, envelope, identities = await web_service(start), None, []
    for _ in range(2):
        window = await client_page(screen, base, before + WATCHED)
        identity, signature, envelope, opened, used = await do(window, USE_KEYS, envelope)
        assert opened == "é"
        assert PublicKey(identity["edPub"]).verify("é".encode(), signature)
        assert {name for name, _ in used} >= {"Ed25519", "X25519"}
        assert not any(is_extractable for _, is_extractable in used)
        identities.append(identity)
    assert identities[0] == identities[1]


async def test_keys_that_are_not_read_back_are_not_replaced(start: Start, screen: Chromium) -> None:
    base = await web_service(start)
    made = await do(await client_page(screen, base), "return {...me}")
    reading = await blank_page(screen, base, WEBKIT)
    failed = "return pysync.IdentityKeys.open().catch(({name, code}) => [name, code])"
    assert await do(reading, failed) == ["StorageError", "failed"]
    assert await do(await client_page(screen, base), "return {...me}") == made


async def test_signature_is_that_of_the_public_key(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window, "return [me.edPub, await (await IdentityKeys.open()).sign(new TextEncoder().encode('é'))]"
    )
    key, signature = shown
    assert PublicKey(key).verify("é".encode(), signature)
    assert not PublicKey(key).verify(b"e", signature)


WITHOUT_CURVES = """
const refused = () => Promise.reject(new DOMException("Unrecognized name.", "NotSupportedError"))
SubtleCrypto.prototype.generateKey = SubtleCrypto.prototype.importKey = refused
"""
WITHOUT_CRYPTO = "Object.defineProperty(Crypto.prototype, 'subtle', {value: undefined})"
WITHOUT_DATABASE = "Object.defineProperty(window, 'indexedDB', {value: undefined})"


@pytest.mark.parametrize(
    ("lacks", "says", "calls"),
    [
        (
            WITHOUT_CURVES,
            "older than Chrome 137",
            ["open()", "generate()", "fromPrivate('11'.repeat(32), '31'.repeat(32))"],
        ),
        (
            WITHOUT_CRYPTO,
            "over https",
            ["open()", "generate()", "fromPrivate('11'.repeat(32), '31'.repeat(32))"],
        ),
        (WITHOUT_DATABASE, "IndexedDB", ["open()"]),
    ],
)
async def test_browser_that_lacks_something_is_told_so_when_keys_are_used(
    start: Start, screen: Chromium, lacks: str, says: str, calls: list[str]
) -> None:
    base = await web_service(start, NOTES)
    window = await screen.open(f"{base}/examples/blank.html", lacks)
    for call in calls:
        shown = await do(
            window,
            f"""return pysync.IdentityKeys.{call}.catch((error) => [
              error instanceof pysync.UnsupportedBrowser, error.name, error.message])""",
        )
        assert shown[:2] == [True, "UnsupportedBrowser"]
        assert says in shown[2]
    # What is public needs no keys.
    assert await do(window, "return (await new pysync.Client('/').push('notes/a', {n: 1})).hash !== ''")


async def test_replica_is_not_opened_where_it_could_not_sync(start: Start, screen: Chromium) -> None:
    window = await blank_page(screen, await web_service(start, NOTES), WITHOUT_CRYPTO)
    opening = "return pysync.Replica.open('app', new pysync.Client('/'), {notes: {}}).catch(({name}) => name)"
    assert await do(window, opening) == "UnsupportedBrowser"
    assert await window.run("indexedDB.databases()") == []


async def test_client_in_a_browser_that_is_too_old_is_told_so(start: Start, screen: Chromium) -> None:
    window = await blank_page(screen, await web_service(start), "delete AbortSignal.any")
    shown = await do(
        window, "try { new pysync.Client('/') } catch ({name, message}) { return [name, message] }"
    )
    message = "this browser is older than Chrome 137, Firefox 130 and Safari 17.4"
    assert shown == ["UnsupportedBrowser", message]


async def test_certificate_names_what_it_allows(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const other = await IdentityKeys.generate(), grant = {ops: ["write"], paths: ["notes/a"]}
        const times = {expiresAtS: 200.7, nowS: 100.9}
        const certificates = [
          await issueDeviceCertificate(me, other),
          await issueDeviceCertificate(me, other, {collections: ["notes"], grant, ...times}),
          await issueMemberCertificate(me, other, "notes"),
          await issueAudienceCertificate(me, "notes", {grant, aud: [other.edPub]}),
        ]
        return certificates.map(({kind, sub, subUserId, aud, scope, nbf, exp}) => [
          kind, sub === other.edPub, subUserId === other.userId, aud?.[0] === other.edPub, scope,
          kind === "device" && nbf < 1e6 ? [nbf, exp] : exp - nbf])""",
    )
    everything = {"ops": ["read", "list", "write"], "paths": ["**"], "collections": ["*"]}
    reading = {"ops": ["read", "list"], "paths": ["notes/**", "!notes/_members"], "collections": ["notes"]}
    writing = {"ops": ["write"], "paths": ["notes/a"], "collections": ["notes"]}
    assert shown == [
        ["device", True, False, False, everything, 30 * 86_400],
        ["device", True, False, False, writing, [100, 200]],
        ["member", True, True, False, reading, 30 * 86_400],
        ["audience", False, False, True, writing, 30 * 86_400],
    ]


async def test_text_that_is_no_certificate_is_rejected(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const other = await IdentityKeys.generate()
        const device = await issueDeviceCertificate(me, other)
        const audience = await issueAudienceCertificate(me, "notes")
        const spoiled = [{kind: "root"}, {iss: me.edPub.toUpperCase()}, {sub: undefined}, {aud: [me.edPub]},
          {scope: {}}, {nbf: "0"}, {exp: device.nbf}, {exp: 1.5e9 + 0.5}, {sig: undefined}, {nonce: 7},
          {sig: audience.sig}, {exp: device.exp + 1}, {extra: 1}, {issUserId: other.userId}]
        const texts = spoiled.map((members) => JSON.stringify({...device, ...members}))
        texts.push("", "[]", "null", "{}", JSON.stringify({...audience, sub: me.edPub}),
          JSON.stringify({...audience, aud: []}), JSON.stringify({...audience, aud: ["me"]}))
        const rejected = (call) => call().then(() => null, ({name}) => name)
        const link = publicLink(audience), {sig, ...signed} = device
        for (const issUserId of [other.userId, "<img src=x onerror=alert(1)>"]) {
          const members = {...signed, issUserId}, message = `starfish-capcert-v1\n${canonicalJson(members)}`
          texts.push(JSON.stringify({...members, sig: await me.sign(new TextEncoder().encode(message))}))
        }
        const links = ["", "#", "a", "é", "abcde", link.slice(1), link.slice(0, 40), btoa("{}"),
          btoa(JSON.stringify({v: 2, cap: audience})), btoa(JSON.stringify({v: 1, cap: device})),
          btoa(JSON.stringify({v: 1, cap: {...audience, sig}}))]
        return [
          await Promise.all(texts.map((text) => rejected(() => parseCertificate(text)))),
          await Promise.all(links.map((fragment) => rejected(() => parsePublicLink(fragment)))),
          await rejected(async () => publicLink(device)),
          await issueAudienceCertificate(me, "a", {aud: []}).catch(({name}) => name),
          await issueDeviceCertificate(me, other, {nowS: 5, expiresAtS: 5}).catch(({name}) => name),
          (await parseCertificate(JSON.stringify(device))).sig === device.sig,
          (await parsePublicLink(` ${link} `)).sig === audience.sig,
        ]""",
    )
    assert shown == [["TypeError"] * 23, ["TypeError"] * 11, *["TypeError"] * 3, True, True]


async def test_revocation_list_that_its_issuer_has_not_signed_is_rejected(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const other = await IdentityKeys.generate(), found = []
        const list = await issueRevocationList(me, 1, {}), others = await issueRevocationList(other, 1, {})
        for (const body of [list, others, {...list, generation: 2}, {...list, sig: others.sig}, {}]) {
          const fetch = scripted(answer(200, body))
          const outcome = new Client("http://h", {fetch}).revocations(me.userId)
          found.push(await outcome.then(({generation}) => generation, ({name}) => name))
        }
        return found""",
    )
    assert shown == [1] + ["BadSignature"] * 4
