"""`trustedIssuers` and `identityRoles` of namespaces and collections: the innermost hold, on every path."""

import json
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, minted_at, root_device
from support.configurations import only
from support.sse_client import Listen

from pysync.auth import issuing
from pysync.config import parse
from pysync.plugins import PluginRequest

CAP = {"readRoles": ["cap:read:notes"], "writeRoles": ["cap:write:notes"]}
ACME, BETA = ISSUER, STRANGER


def tenant(name: str, issuer: str) -> dict[str, Any]:
    """A namespace that trusts one issuer."""
    own = {"storagePath": name + "/notes/{id}", **CAP}
    return {
        "trustedIssuers": [issuer],
        "collections": [
            {"name": "notes", "listable": True, **own},
            {"name": "rings", **own, "storagePath": name + "/notes/{id}/_keyring"},
            {"name": "page", **own, "storagePath": name + "/pages/{id}", "bundle": "page"},
            {"name": "open", "storagePath": name + "/open/{id}", "readRoles": ["device:root"],
             "writeRoles": ["device:root"],
             "keyringPath": name + "/notes/{id}/_keyring"},
        ],
    }  # fmt: skip


TENANTS: dict[str, Any] = {
    "auth": {"trustedIssuers": [ACME.ed_pub, BETA.ed_pub]},
    "configEndpoint": {"auth": "role-filtered"},
    "namespaces": {"acme": tenant("acme", ACME.ed_pub), "beta": tenant("beta", BETA.ed_pub)},
}


@pytest.fixture
async def tenants(start: Start, session: aiohttp.ClientSession) -> tuple[Signed, Signed]:
    """The issuers of both tenants, each with a certificate for `notes`."""
    base = await start(TENANTS)
    acme, beta = (
        Signed(base, session, keys, root_device(keys, collections=("notes",))) for keys in (ACME, BETA)
    )
    return acme, beta


async def test_an_issuer_of_one_namespace_opens_nothing_in_another(tenants: tuple[Signed, Signed]) -> None:
    acme, beta = tenants
    for target in ("/acme/push/acme/notes/a", "/acme/push/acme/pages/a/page"):
        assert (await beta.request("POST", target, {"data": {"n": 1}})).status == 403
        assert (await acme.request("POST", target, {"data": {"n": 1}})).status == 200
    for target in ("/acme/pull/acme/notes/a", "/acme/list/acme/notes", "/acme/events?collections=notes"):
        method = "HEAD" if "events" in target else "GET"
        assert (await beta.request(method, target)).status == 403
        assert (await acme.request(method, target)).status == 200


async def test_plugins_see_the_roles_that_hold_in_the_collection(
    start: Start, session: aiohttp.ClientSession
) -> None:
    class Seeing:
        name = "seeing"

        def __init__(self) -> None:
            self.seen: list[tuple[str | None, bool]] = []

        async def before_pull(self, request: PluginRequest) -> None:
            self.seen.append((request.namespace, "cap:read:notes" in request.caller.roles))

    seeing = Seeing()
    base = await start(TENANTS, plugins=[seeing])
    beta = Signed(base, session, BETA, root_device(BETA, collections=("notes",)))
    for target in ("/acme/pull/acme/open/a", "/beta/pull/beta/open/a"):
        assert (await beta.request("GET", target)).status == 200
    assert seeing.seen == [("acme", False), ("beta", True)]


async def test_nor_in_batches_bundles_and_folded_keyrings(tenants: tuple[Signed, Signed]) -> None:
    acme, beta = tenants
    await acme.request("POST", "/acme/push/acme/notes/a", {"data": {"n": 1}})
    await acme.request("POST", "/acme/push/acme/notes/a/_keyring", {"data": {"k": 1}})
    await acme.request("POST", "/acme/push/acme/pages/a/page", {"data": {"p": 1}})
    params = quote(json.dumps({"notes": [{"id": "a"}]}))
    batch = f"/acme/batch/pull?collections=notes&params={params}"
    ring = "/acme/pull/acme/open/a?withKeyring=1"
    assert (await acme.request("GET", batch)).json["collections"]["notes"][0]["data"] == {"n": 1}
    assert (await beta.request("GET", batch)).json["collections"]["notes"][0] == {"error": "Forbidden"}
    assert list((await acme.request("GET", "/acme/pull/acme/pages/a")).json["collections"]) == ["page"]
    assert (await beta.request("GET", "/acme/pull/acme/pages/a")).json["collections"] == {}
    assert (await acme.request("GET", ring)).json["keyring"]["data"] == {"k": 1}
    answer = await beta.request("GET", ring)
    assert (answer.status, "keyring" in answer.json) == (200, False)


async def test_nor_in_the_filtered_manifest(tenants: tuple[Signed, Signed]) -> None:
    for issuer, own, other in (("acme", *tenants), ("beta", *tenants[::-1])):
        assert await shown(own, issuer) == ["notes", "rings", "page", "open"]
        assert await shown(other, issuer) == ["open"]


async def test_stream_omits_changes_outside_the_trust_scope_of_the_issuer(
    tenants: tuple[Signed, Signed], subscribe: Listen
) -> None:
    acme, beta = tenants
    one, other = await subscribe(acme, "/acme/events"), await subscribe(beta, "/acme/events")
    assert (one.status, other.status) == (200, 200)  # both may hear of what is open
    await acme.request("POST", "/acme/push/acme/notes/a", {"data": {"n": 1}})
    for name in ("b", "c"):
        await acme.request("POST", f"/acme/push/acme/open/{name}", {"data": {}})
    assert [event["collection"] for event in await one.events(2)] == ["notes", "open"]
    assert [event["collection"] for event in await other.events(2)] == ["open", "open"]


@pytest.mark.parametrize(
    ("server", "namespace", "own", "holds"),
    [
        (None, None, None, True),
        ([], None, None, False),
        ([], [ISSUER.ed_pub], None, True),
        ([ISSUER.ed_pub], [], None, False),
        ([], [], [ISSUER.ed_pub], True),
        ([ISSUER.ed_pub], [ISSUER.ed_pub], [], False),
        ([STRANGER.ed_pub], None, [ISSUER.ed_pub], True),
    ],
)
async def test_the_innermost_trusted_issuers_hold(
    start: Start, session: aiohttp.ClientSession, server: Any, namespace: Any, own: Any, holds: bool
) -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", **CAP, "trustedIssuers": own}
    members = {
        "auth": {"trustedIssuers": server},
        "namespaces": {"acme": {"trustedIssuers": namespace, "collections": [notes]}},
    }
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "notes", grant=issuing.writer_grant("notes"), **minted_at()
    )
    member = Signed(await start(members), session, SUBJECT, certificate)
    assert (await member.request("GET", "/acme/pull/notes/a")).status == (200 if holds else 403)


@pytest.mark.parametrize(
    ("server", "namespace", "own", "holds"),
    [
        (["editor"], None, None, True),
        (["editor"], [], None, False),
        ([], ["editor"], None, True),
        ([], ["editor"], ["reader"], False),
        (None, None, ["editor"], True),
    ],
)
async def test_the_innermost_identity_roles_hold(
    start: Start, session: aiohttp.ClientSession, server: Any, namespace: Any, own: Any, holds: bool
) -> None:
    def given(roles: Any) -> Any:
        return None if roles is None else {SUBJECT.user_id: roles}

    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["editor"]}
    members = {
        "auth": {"identityRoles": given(server)},
        "namespaces": {
            "acme": {
                "identityRoles": given(namespace),
                "collections": [{**notes, "identityRoles": given(own)}],
            }
        },
    }
    somebody = Signed(await start(members), session, SUBJECT, root_device(SUBJECT))
    assert (await somebody.request("GET", "/acme/pull/notes/a")).status == (200 if holds else 403)


async def test_hidden_members_and_roles_of_a_space_go_by_the_innermost_trust(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """Roles of a space stay, and members are shown by the roles that count in the collection."""
    editors = {SUBJECT.user_id: ["editor"]}
    doc = {
        "name": "doc",
        "storagePath": "spaces/{spaceId}/doc",
        "readRoles": ["space:member"],
        "writeRoles": ["space:member"],
        "fieldPermissions": {"salary": {"readRoles": ["editor"]}},
        "identityRoles": {},
    }
    access = {**doc, "name": "access", "storagePath": "spaces/{spaceId}/_access", "fieldPermissions": {},
              "writeRoles": ["space:owner"]}  # fmt: skip
    for own, data in (({}, {"name": "bob"}), (editors, {"name": "bob", "salary": 1})):
        members = {
            "auth": {"spaces": {}, "identityRoles": editors},
            "collections": [{**doc, "identityRoles": own}, access],
        }
        somebody = Signed(await start(members), session, SUBJECT, root_device(SUBJECT))
        assert (await somebody.push("spaces/s/_access", {"owner": SUBJECT.user_id})).status == 200
        assert (await somebody.push("spaces/s/doc", {"name": "bob", "salary": 1})).status == 200
        assert (await somebody.pull("spaces/s/doc")).json["data"] == data


def test_a_preset_may_trust_its_own_issuers() -> None:
    rows = {"preset": "parquet", "name": "rows", "storagePath": "rows/{id}"}
    own = {"trustedIssuers": [ISSUER.ed_pub], "identityRoles": {"u": ["editor"]}}
    (found,) = parse({"collections": [{**rows, **own}]}).collections
    assert (found.trusted_issuers, found.identity_roles) == ((ISSUER.ed_pub,), {"u": ("editor",)})


def test_issuers_of_namespaces_and_collections_are_keys() -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}"}
    message = "must be a public key of 64 lower-case hex digits"
    assert only({"collections": [{**notes, "trustedIssuers": ["me"]}]}) == (
        "collections[0].trustedIssuers[0]",
        message,
    )
    inside = {"acme": {"collections": [notes], "trustedIssuers": [ISSUER.ed_pub.upper()]}}
    assert only({"namespaces": inside}) == ("namespaces.acme.trustedIssuers[0]", message)


async def shown(browser: Browser, namespace: str) -> list[str]:
    answer = await browser.request("GET", f"/{namespace}/config")
    return [collection["name"] for collection in answer.json["collections"]]
