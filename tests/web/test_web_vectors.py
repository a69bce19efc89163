"""The browser client makes what every client of the protocol makes.

These vectors do not apply to it: `root_identity` needs Argon2, which browsers do not have. `request_verify`,
`cap_certs`, `path_glob`, `scope_path_match` and `ed25519_edges` are decisions of servers. `pairing_qr` and
`link_fragment` belong to other packages. The vectors of sealed data have a module of their own.
"""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from support.browser import Chromium
from support.clients import Start
from support.web_pages import client_page, do, web_service

from pysync._core import PublicKey, verify_request

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/protocol.json").read_text())
KEYS = VECTORS["meta"]["keys"]
ISSUER = KEYS["issuer"]


async def test_canonical_json_is_that_of_every_client(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    texts = [case["inputJson"] for case in VECTORS["canonical"]]
    made = await do(window, "return $[0].map((text) => canonicalJson(JSON.parse(text)))", texts)
    expected = [case["expected" if case["agree"] else "recommended"] for case in VECTORS["canonical"]]
    assert made == [each["canonical"] for each in expected]


async def test_keys_have_the_public_halves_and_the_user_id_of_every_client(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start))
    for keys in KEYS.values():
        made = await do(
            window, "return {...await IdentityKeys.fromPrivate($[0], $[1])}", keys["edPriv"], keys["kemPriv"]
        )
        assert made == {name: keys[name] for name in ("edPub", "kemPub", "userId")}


# A browser has no request without a host and encodes the characters of a path. The client makes nonces of 16
# bytes, and sends no body with a DELETE.
IMPOSSIBLE = {"no-host", "unicode-path", "one-byte-nonce", "ts-zero"}
CALLS = {
    "get-simple": 'pull("users/abc/settings")',
    "get-query": 'pull("log/l1", {since: 5, last: 2})',
    "post-json": 'push("notes/n1", {a: 1})',
    "post-empty-body": 'pushBlob("blob/b1", new Uint8Array([7]), "image/png")',
    "ipv6-host": 'pull("x")',
}


async def test_requests_are_signed_as_every_client_signs_them(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    cases = {case["id"]: case for case in VECTORS["request_signing"]}
    assert cases.keys() == CALLS.keys() | IMPOSSIBLE
    for name, call in CALLS.items():
        case, expected = cases[name], cases[name]["expected"]
        sent = await do(
            window,
            f"""const [{{privKey, host, ts, nonceHex}}, kemPriv] = $
            const keys = await IdentityKeys.fromPrivate(privKey, kemPriv)
            const certificate = await issueDeviceCertificate(keys, keys)
            const nonce = nonceHex.match(/../g).map((pair) => parseInt(pair, 16))
            crypto.getRandomValues = (bytes) => (bytes.set(nonce.slice(0, bytes.length)), bytes)
            Date.now = () => ts
            const fetch = scripted(answer(200, PULLED))
            await new Client(`http://${{host}}`, {{keys, certificate, fetch}}).{call}
            const [{{url, method, headers}}] = fetch.sent
            return {{url, method, headers}}""",
            case,
            ISSUER["kemPriv"],
        )
        assert (sent["method"], sent["url"]) == (
            case["method"],
            f"http://{case['host']}{case['pathAndQuery']}",
        )
        signed = [sent["headers"][f"X-Starfish-{each}"] for each in ("Sig", "Ts", "Nonce")]
        assert signed == [expected["sig"], expected["tsHeader"], expected["nonce"]], name


WHATWG = {"http://127.1": "127.0.0.1"}


async def test_requests_sign_the_host_of_the_base_url(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    cases = {case["baseUrl"]: case.get("expected") for case in VECTORS["signing_host_from_base_url"]} | WHATWG
    for base_url, host in cases.items():
        if "user" in base_url or not base_url.startswith("http"):
            continue  # the client takes no address with a password, and relative ones are those of its page
        headers = await do(
            window,
            """const fetch = scripted(answer(200, PULLED))
            await new Client($[0], {keys: me, fetch}).pull("x")
            const [{url, headers}] = fetch.sent
            return {...headers, edPub: me.edPub, target: new URL(url).pathname}""",
            base_url,
        )
        target = headers["target"].removeprefix(urlsplit(base_url).path)
        assert verify_request(
            PublicKey(headers["edPub"]),
            headers["X-Starfish-Sig"],
            "GET",
            [target],
            b"",
            host,
            int(headers["X-Starfish-Ts"]),
            headers["X-Starfish-Nonce"],
        ), base_url


async def test_certificates_and_links_are_those_that_every_client_makes(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start))
    device, member, audience, link = (case["expected"] for case in VECTORS["minted_caps"])
    made = await do(
        window,
        """const [issuer, subject, aud, nowS] = $
        crypto.getRandomValues = (bytes) => (bytes.set(bytes.map((_, at) => at)), bytes)
        const keys = await IdentityKeys.fromPrivate(issuer.edPriv, issuer.kemPriv)
        const until = (seconds) => ({nowS, expiresAtS: nowS + seconds})
        return [
          await issueDeviceCertificate(keys, subject, until(3600)),
          await issueMemberCertificate(keys, subject, "notes", until(9999)),
          await issueAudienceCertificate(keys, "notes", {aud, ...until(60)}),
          publicLink(await issueAudienceCertificate(keys, "notes", until(60))),
        ]""",
        ISSUER,
        KEYS["subject"],
        audience["aud"],
        device["nbf"],
    )
    assert made == [device, member, audience, link["fragment"]]
    parsed = await do(window, "return parsePublicLink(`#${$[0]}`)", link["fragment"])
    assert parsed == link["cap"]


async def test_revocation_lists_are_those_that_every_client_makes(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    (case,) = VECTORS["revocation_list"]
    expected = case["expected"]
    made = await do(
        window,
        """const keys = await IdentityKeys.fromPrivate($[0].edPriv, $[0].kemPriv)
        const {generation, revoked: certificates, revokedSubjects: subjects} = $[1]
        const whole = await issueRevocationList(keys, generation, {certificates, subjects})
        const first = await issueRevocationList(keys, 1, {certificates: certificates.slice(0, 1), subjects})
        const second = {certificates: certificates.slice(1), subjects, earlier: first}
        return [whole, await issueRevocationList(keys, generation, second)]""",
        ISSUER,
        expected,
    )
    assert made == [expected, expected]


# The client signs the key of the document, whatever path it is given.
PREFIXED = "key-with-prefix-kept"


async def test_author_proofs_are_those_that_every_client_makes(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    for case in VECTORS["append_author"]:
        made = await do(
            window,
            """const [{documentKey, data, authorPriv}, kemPriv] = $
            const keys = await IdentityKeys.fromPrivate(authorPriv, kemPriv)
            const fetch = scripted(answer(200, PUSHED), answer(200, PUSHED))
            const client = new Client("http://h", {keys, fetch})
            await client.append(documentKey, data)
            await client.push(documentKey, data, null, {signAuthor: true})
            return fetch.sent.map(({body}) => {
              const {authorPubkey, authorSignature} = JSON.parse(new TextDecoder().decode(body))
              return {authorPubkey, authorSignature}
            })""",
            case,
            ISSUER["kemPriv"],
        )
        twin = VECTORS["append_author"][0] if case["id"] == PREFIXED else case
        assert made == [twin["expected"]["append"], twin["expected"]["doc"]], case["id"]


async def test_queries_of_batches_mean_those_of_every_client(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    for case in VECTORS["batch_query_encoding"]:
        if len(case["collections"]) > 1:
            continue  # the client asks for one collection at a time
        (name,) = case["collections"]
        url = await do(
            window,
            """const [collection, params, append] = $
            const fetch = scripted(answer(200, {collections: {[collection]: params.map(() => PULLED)}}))
            await new Client("http://h", {fetch}).batchPull(collection, params, {append})
            return fetch.sent[0].url""",
            name,
            case["params"][name],
            (case["appendParams"] or {}).get(name),
        )
        made, expected = dict(parse_qsl(urlsplit(url).query)), dict(parse_qsl(case["pythonQuery"]))
        assert {key: _loaded(value) for key, value in made.items()} == {
            key: _loaded(value) for key, value in expected.items()
        }


def _loaded(value: str) -> Any:
    return json.loads(value) if value.startswith("{") else value
