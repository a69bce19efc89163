"""The calls of the browser client, against a real server."""

from support.browser import Chromium
from support.clients import Start
from support.collections import LOG, MINE, NOTES, collection
from support.web_pages import client_page, do, web_service

from pysync import __version__
from pysync.auth.certificates import from_authorization
from pysync.client import Client

KEPT = collection("kept", history={"versions": 5}, deletable=True)
PHOTOS = collection("photos", allowedMimeTypes=["image/*", "application/json"])
LISTED = collection("listed", listable=True)


async def test_module_has_the_version_of_the_server(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    assert await window.run("VERSION") == __version__


async def test_document_is_replaced_and_deleted_by_its_hash(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, KEPT))
    shown = await do(
        window,
        """const client = new Client("/")
        const missing = await client.pull("kept/a")
        const first = await client.push("kept/a", {n: 1})
        const others = {"\\u{1f600}": [{constructor: 2}], "\\uffff": 1e21}
        const data = {n: -0, constructor: 1, left: undefined, ...others}
        const second = await client.push("/push/kept/a", data, first.hash)
        const conflict = await client.push("kept/a", {n: 3}, first.hash).catch((error) => error)
        const pulled = await client.pull("/pull/kept/a")
        const earlier = await client.pull("kept/a", {version: first.hash})
        const unknown = await client.pull("kept/a", {version: "0".repeat(64)}).catch((error) => error)
        const versions = await client.history("kept/a")
        const deleted = await client.delete("kept/a", second.hash)
        return {
          missing: [missing.hash, missing.data], pulled: pulled.data, earlier: earlier.data,
          hashes: [pulled.hash === second.hash, pulled.hash === await documentHash(data)],
          conflict: [conflict.name, conflict.currentHash === second.hash], unknown: unknown.name,
          versions: versions.map(({hash}) => [first, second].findIndex((each) => each.hash === hash)),
          deleted: deleted.hash, gone: (await client.pull("kept/a")).hash,
        }""",
    )
    assert shown == {
        "missing": ["", {}],
        "pulled": {"n": 0, "\U0001f600": [{"constructor": 2}], "\uffff": 1e21},
        "hashes": [True, True],
        "conflict": ["Conflict", True],
        "earlier": {"n": 1},
        "unknown": "VersionNotFound",
        "versions": [1, 0],
        "deleted": "",
        "gone": "",
    }


async def test_values_that_json_cannot_hold_are_not_sent(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, NOTES))
    shown = await do(
        window,
        """const client = new Client("/"), found = []
        const others = [[undefined], new Date(), new Map(), 1n, () => 1, "\\ud800", Symbol("a")]
        for (const value of [NaN, Infinity, ...others]) {
          found.push(await client.push("notes/a", {value}).catch(({name}) => name))
        }
        return [found, (await client.pull("notes/a")).hash]""",
    )
    assert shown == [["RangeError"] * 2 + ["TypeError"] * 7, ""]


async def test_log_is_read_by_its_bounds(start: Start, screen: Chromium) -> None:
    signed = collection("signed", appendOnly={})
    window = await client_page(screen, await web_service(start, LOG, signed))
    shown = await do(
        window,
        """const client = new Client("/", {keys: me})
        const none = elements(await client.pull("log/a", {last: 5}))
        const first = await client.append("log/a", {n: 1}), second = await client.append("log/a", {n: 2})
        const since = elements(await client.pull("log/a", {since: first.timestampMs}))
        const all = elements(await client.pull("log/a", {full: true}), "items")
        await client.append("signed/a", {n: 1})
        const late = await client.append("log/a", {}, {tsMs: 1}).catch(({name}) => name)
        const [element] = elements(await client.pull("signed/a", {last: 1}))
        return {none, since: since.map(({data}) => data), all: all.map(({data}) => data), late,
          times: since[0].tsMs === second.timestampMs, author: element.authorPubkey === me.edPub}""",
    )
    assert shown == {
        "none": [],
        "since": [{"n": 2}],
        "all": [{"n": 1}, {"n": 2}],
        "late": "NonMonotonicTimestamp",
        "times": True,
        "author": True,
    }


async def test_element_has_the_time_that_its_place_in_the_log_has(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    sent = {"ts": 1, "data": {"n": 1}, "authorPubkey": "k", "tsMs": 9, "key": "log/other"}
    shown = await do(window, "return elements({hash: 'h', data: {items: [$[0]]}})", sent)
    assert shown == [{"tsMs": 1, "data": {"n": 1}, "authorPubkey": "k"}]


async def test_batch_has_an_entry_for_each_of_its_params(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, LOG, MINE))
    shown = await do(
        window,
        """const client = new Client("/", {keys: me}), identity = me.userId
        const {hash} = await client.push(`u/${identity}/a`, {n: 1})
        await client.push(`u/${identity}/b`, {n: 2})
        for (const n of [1, 2, 3]) await client.append("log/l", {n})
        const params = [..."aab"].map((id) => ({identity, id}))
        const others = [{id: "none"}, {id: "../a"}, {identity: "0".repeat(32), id: "a"}]
        const known = [hash, "0".repeat(64), null, undefined, "", null]
        const entries = await client.batchPull("mine", [...params, ...others], {known})
        const logs = await client.batchPull("log", [{id: "l"}, {id: "l"}], {append: [{last: 1}, {since: 0}]})
        return {entries: entries.map((each) => each.name ?? [each.unchanged, each.data, each.hash === hash]),
          logs: logs.map((each) => elements(each).map(({data}) => data.n)),
          none: await client.batchPull("log", [])}""",
    )
    assert shown == {
        "entries": [
            [True, {}, True],
            [False, {"n": 1}, True],
            [False, {"n": 2}, False],
            [False, {}, False],
            "InvalidPathParameter",
            "Forbidden",
        ],
        "logs": [[3], [1, 2, 3]],
        "none": [],
    }


async def test_bundle_is_pulled_with_its_members(start: Start, screen: Chromium) -> None:
    title = collection("title", "boards/{id}", bundle="board")
    cards = collection("cards", "boards/{id}", bundle="board")
    window = await client_page(screen, await web_service(start, title, cards))
    shown = await do(
        window,
        """const client = new Client("/")
        await client.push("boards/b/title", {text: "Spring"})
        const {collections: {title, cards}} = await client.request("GET", "/pull/boards/b")
        return [title.data, cards.hash]""",
    )
    assert shown == [{"text": "Spring"}, ""]


async def test_keyring_comes_with_its_document(start: Start, screen: Chromium) -> None:
    vault = collection("vault", "vault/{id}", keyringPath="vault/{id}/_keyring")
    keyring = collection("keyring", "vault/{id}/_keyring")
    window = await client_page(screen, await web_service(start, vault, keyring))
    shown = await do(
        window,
        """const client = new Client("/")
        await client.push("vault/a", {n: 1})
        await client.push("vault/a/_keyring", {v: 1})
        const {keyring} = await client.pull("vault/a", {withKeyring: true})
        return [(await client.pull("vault/a")).keyring ?? null, keyring.data]""",
    )
    assert shown == [None, {"v": 1}]


async def test_list_goes_over_all_pages(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, LISTED))
    shown = await do(
        window,
        """const client = new Client("/"), hashes = []
        for (const name of "abcde") hashes.push((await client.push(`listed/${name}`, {name})).hash)
        const all = async (pages) => {
          const found = []
          for await (const each of pages) found.push(each)
          return found
        }
        const pairs = await all(client.listHashes("listed", {pageSize: 2}))
        const names = await all(client.list("listed", {pageSize: 2}))
        return [names, await all(client.list("listed", {after: "c"})), pairs.map(([name]) => name),
          pairs.every(([, hash], at) => hash === hashes[at].slice(0, 16))]""",
    )
    assert shown == [list("abcde"), ["d", "e"], list("abcde"), True]


async def test_file_is_compared_with_its_hash(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, PHOTOS, NOTES))
    shown = await do(
        window,
        """const client = new Client("/", {keys: me, backoff: {attempts: 1}})
        const bytes = new Uint8Array(300_000).map((_, at) => at * 7)
        const {hash} = await client.pushBlob("photos/a", bytes, "image/png")
        const file = await client.pullBlob("photos/a")
        const again = new Uint8Array(await file.blob.arrayBuffer())
        const damaged = new Client("/", {backoff: {attempts: 1}, fetch: async (url, options) => {
          const {headers} = await fetch(url, options)
          return new Response("damaged", {headers})
        }})
        const blob = new Blob(['{"data": {"n": 1}, "baseHash": null}'])
        await client.pushBlob("photos/json", blob, "application/json")
        const isSame = again.every((each, at) => each === bytes[at])
        return {file: [file.contentType, file.blob.type, file.hash === hash, isSame],
          missing: await client.pullBlob("photos/b"), json: (await client.pull("photos/json")).data,
          damaged: await damaged.pullBlob("photos/a").catch(({name}) => name),
          isDocument: await client.pullBlob("photos/json").catch(({message}) => message),
          isFile: await client.pull("photos/a").catch(({message}) => message)}""",
    )
    assert shown == {
        "file": ["image/png", "image/png", True, True],
        "missing": None,
        "json": {"n": 1},
        "damaged": "Unreachable",
        "isDocument": "what is stored is a document, not a file",
        "isFile": "a file is there: pullBlob gets it",
    }


async def test_changes_come_in_pages_with_a_cursor(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, KEPT, LOG))
    shown = await do(
        window,
        """const client = new Client("/"), pages = []
        const {cursor} = await client.changes("now")
        for (const id of "abc") await client.push(`kept/${id}`, {id})
        await client.delete("kept/b", (await client.pull("kept/b")).hash)
        await client.append("log/l", {})
        for await (const page of client.changePages(cursor, ["kept"], {}, 2)) pages.push(page)
        const one = await client.changes(cursor, null, {kept: {id: "c"}})
        return {pages: pages.map((page) => page.changes.map(({params, removed}) => [params.id, removed])),
          one: one.changes.map(({collection, params}) => `${collection} ${params.id}`),
          templates: await client.keyTemplates(["kept", "log"])}""",
    )
    assert shown == {
        "pages": [[["a", False], ["c", False]], [["b", True]]],
        "one": ["kept c", "log l"],
        "templates": {"kept": "kept/{id}", "log": "log/{id}"},
    }


async def test_manifest_and_usage_are_the_answers_of_the_server(start: Start, screen: Chromium) -> None:
    quotas = {"identity": {"bytes": 1000}}
    base = await web_service(start, MINE, quotas=quotas, configEndpoint={"auth": "public"})
    window = await client_page(screen, base)
    shown = await do(
        window,
        """const client = new Client("/", {keys: me})
        await client.push(`u/${me.userId}/a`, {n: 1})
        const [{collections}, {used, identity}] = [
          await client.request("GET", "/config"), await client.request("GET", "/usage")]
        return [collections.map(({name}) => name), used.documents, identity === me.userId]""",
    )
    assert shown == [["mine"], 1, True]


async def test_request_to_any_route_is_signed_and_repeated_as_the_others(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start, MINE))
    shown = await do(
        window,
        """const fetch = scripted(null, answer(503, {}), answer(200, {hash: "h"}), answer(200, {n: 1}))
        const client = new Client("http://h", {keys: me, namespace: "acme", fetch, backoff: QUICK})
        const got = [
          await client.request("POST", "/push/a", {data: {n: 1}}), await client.request("GET", "/b?c=1")]
        const sent = fetch.sent.map(({url, method, body, headers}) => [
          url, method, body && new TextDecoder().decode(body), headers["Idempotency-Key"] ?? null])
        return [got, sent, fetch.sent.every(({headers}) => headers.Authorization.startsWith("Cap "))]""",
    )
    key = shown[1][0][3]
    push = ["http://h/v1/acme/push/a", "POST", '{"data":{"n":1}}', key]
    get = ["http://h/v1/acme/b?c=1", "GET", None, None]
    assert len(key) == 32
    assert shown == [[{"hash": "h"}, {"n": 1}], [push, push, push, get], True]


async def test_server_may_have_a_mount_path_and_namespaces(start: Start, screen: Chromium) -> None:
    namespaces = {"acme": {"collections": [MINE]}}
    base = await web_service(start, MINE, namespaces=namespaces, server={"mountPath": "/v1"})
    window = await client_page(screen, base)
    shown = await do(
        window,
        """const key = `u/${me.userId}/a`, origin = location.origin
        const inside = new Client(origin, {keys: me, namespace: "acme"})
        const root = new Client("/v1/", {keys: me})
        const {hash} = await inside.push(key, {n: 1})
        const {changes: [change]} = await inside.changes()
        return [inside.address === `${origin}/v1/acme`, root.address === `${origin}/v1`,
          (await root.pull(key)).hash === hash, change.namespace, change.collection]""",
    )
    assert shown == [True, True, True, "acme", "mine"]


async def test_anonymous_client_has_no_identity_and_reads_what_is_public(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start, NOTES, MINE))
    shown = await do(
        window,
        """const client = new Client("/")
        await client.push("notes/a", {n: 1})
        return [client.identity, client.author, client.certificate, (await client.pull("notes/a")).data,
          await client.pull(`u/${me.userId}/a`).catch(({name}) => name),
          await client.push("notes/b", {}, null, {signAuthor: true}).catch(({name}) => name)]""",
    )
    assert shown == ["", None, None, {"n": 1}, "Unauthorized", "TypeError"]


async def test_own_certificate_is_issued_for_the_first_request(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, MINE))
    shown = await do(
        window,
        """const client = new Client("/", {keys: me})
        const before = [client.certificate, client.identity === me.userId, client.author === me.edPub]
        await client.push(`u/${me.userId}/a`, {n: 1})
        const {certificate} = client
        await client.pull(`u/${me.userId}/a`)
        return [...before, certificate.sub === me.edPub, client.certificate === certificate]""",
    )
    assert shown == [None, True, True, True, True]


async def test_certificate_of_another_lets_a_device_in_until_it_is_revoked(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start, MINE))
    shown = await do(
        window,
        """const owner = me, device = await IdentityKeys.generate(), key = `u/${owner.userId}/a`
        const issued = await issueDeviceCertificate(owner, device)
        const certificate = await parseCertificate(JSON.stringify(issued))
        const client = new Client("/", {keys: device, certificate}), mine = new Client("/", {keys: owner})
        await mine.push(key, {n: 1})
        const pulled = await client.pull(key)
        const list = await issueRevocationList(owner, 1, {certificates: [certificate]})
        const generation = await mine.revoke(list)
        const stale = await mine.revoke(list).catch(({name}) => name)
        const found = await client.revocations(owner.userId)
        return [client.identity === owner.userId, pulled.data, generation, stale, found.sig === list.sig,
          await client.pull(key).catch(({name}) => name), await client.revocations(device.userId)]""",
    )
    assert shown == [True, {"n": 1}, 1, "StaleGeneration", True, "Unauthorized", None]


async def test_certificate_for_another_key_is_not_taken(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const [one, other] = [await IdentityKeys.generate(), await IdentityKeys.generate()]
        const certificate = await issueDeviceCertificate(one, one)
        const link = await issueAudienceCertificate(one, "notes")
        const attempts = [
          () => new Client("/", {keys: other, certificate}),
          () => new Client("/", {certificate}),
          () => { new Client("/", {keys: other}).certificate = certificate },
        ]
        const audience = new Client("/", {keys: other, certificate: link})
        return [attempts.map((attempt) => { try { attempt() } catch ({message}) { return message } }),
          audience.identity === other.userId]""",
    )
    assert shown == [["the certificate is for another key"] * 3, True]


async def test_lost_answers_are_asked_for_again_and_apply_once(start: Start, screen: Chromium) -> None:
    base = await web_service(start, LOG, KEPT)
    window = await client_page(screen, base)
    shown = await do(
        window,
        """const keys = []
        let lost = 0
        const losing = async (url, options) => {
          const response = await fetch(url, options)
          keys.push(options.headers["Idempotency-Key"])
          if (lost++ % 2) return response
          throw new TypeError("Failed to fetch")
        }
        const client = new Client("/", {keys: me, fetch: losing, backoff: QUICK})
        await client.append("log/a", {n: 1})
        const {hash} = await client.push("kept/a", {n: 1})
        await client.delete("kept/a", hash)
        const pulled = await client.pull("log/a", {full: true})
        return [elements(pulled).length, keys.map((each) => keys.indexOf(each))]""",
    )
    # The pull has no key.
    assert shown == [1, [0, 0, 2, 2, 4, 4, 6, 6]]
    async with Client(base) as direct:
        assert (await direct.pull("kept/a")).hash == ""


async def test_requests_are_repeated_as_often_as_the_policy_says(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const attempts = async (call, ...answers) => {
          const fetch = scripted(...answers), backoff = {...QUICK, attempts: 3}
          const client = new Client("http://h", {fetch, backoff})
          const outcome = await call(client).then(() => "ok", ({name}) => name)
          return [outcome, fetch.sent.length]
        }
        const pull = (client) => client.pull("a"), slow = answer(503, {}, {"Retry-After": "60"})
        const list = {iss: "a", sig: "b"}
        return [
          await attempts(pull, null, answer(429, {}), answer(200, PULLED)),
          await attempts(pull, null, answer(503, {}), null, answer(200, PULLED)),
          await attempts(pull, answer(500, {})),
          await attempts(pull, slow),
          await attempts((client) => client.revoke(list), null),
        ]""",
    )
    assert shown == [
        ["ok", 3],
        ["Unreachable", 3],
        ["InternalError", 1],
        ["Unavailable", 1],
        ["Unreachable", 1],
    ]


async def test_each_attempt_is_signed_afresh(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    sent = await do(
        window,
        """const fetch = scripted(null, null, answer(200, PUSHED))
        await new Client("http://h", {keys: me, fetch, backoff: QUICK}).push("a", {})
        return fetch.sent.map(({headers}) => headers)""",
    )
    assert len({headers["X-Starfish-Nonce"] for headers in sent}) == 3
    assert len({headers["X-Starfish-Sig"] for headers in sent}) == 3
    assert len({headers["Idempotency-Key"] for headers in sent}) == 1
    assert len({from_authorization(headers["Authorization"]).nonce for headers in sent}) == 1


async def test_answer_that_does_not_come_is_unreachable(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const hanging = (url, {signal}) => new Promise((_, reject) => {
          signal.onabort = () => reject(signal.reason)
        })
        const client = new Client("http://h", {fetch: hanging, timeoutS: 0.01, backoff: {attempts: 1}})
        return client.pull("a").catch(({name, message}) => [name, message])""",
    )
    assert shown == ["Unreachable", "http://h: no answer in time"]


async def test_keys_that_a_url_would_change_are_not_sent(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start, NOTES))
    shown = await do(
        window,
        """const client = new Client("/"), found = []
        await client.push("notes/a", {})
        for (const key of ["notes/x/../a", "notes/./a", "notes/..", "notes/%2e%2e", "notes//a"]) {
          found.push(await client.pull(key).then(({hash}) => hash, ({name}) => name))
        }
        return found""",
    )
    assert shown == ["InvalidPathParameter"] * 5


async def test_address_of_something_else_is_not_taken(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const urls = ["ftp://h", "http://user@h", "http://h?a", "http://h#a", "data:,"]
        return urls.map((url) => { try { new Client(url) } catch ({name}) { return name } })""",
    )
    assert shown == ["TypeError"] * 5
