"""The role `delegated:{identity}:NAME`: people let others into what is theirs, by certificates and links."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson
import pytest
from support.change_pages import pages
from support.clients import STRANGER, SUBJECT, Signed, Start, minted_at, root_device
from support.collections import UNSIGNED, collection
from support.configurations import EXAMPLE
from support.sse_client import Listen

from pysync.auth import issuing
from pysync.auth.certificates import Certificate
from pysync.auth.identity_keys import IdentityKeys
from pysync.clock import wall_clock_ms
from pysync.testing import FakeClock

ANNA = IdentityKeys.from_private(b"\x51" * 32, b"\x61" * 32)
"""Shares what is hers; SUBJECT is whom she lets in."""
BEN = IdentityKeys.from_private(b"\x52" * 32, b"\x62" * 32)
SHARED = "delegated:{identity}:notebooks"
ROLES = {"readRoles": ["self", SHARED], "writeRoles": ["self", SHARED]}
NOTEBOOKS = collection(
    "notebooks", "notebooks/{identity}/{id}", **ROLES, listable=True, deletable=True, history={"versions": 5}
)
COLLECTIONS = [
    NOTEBOOKS,
    collection("diary", "diary/{identity}/{id}", **ROLES, appendOnly=UNSIGNED),
    collection("photos", "photos/{identity}/{id}", **ROLES, allowedMimeTypes=["image/png"]),
    collection("title", "pages/{identity}/{id}", **ROLES, bundle="pages"),
    collection("body", "pages/{identity}/{id}", **ROLES, bundle="pages"),
    collection("secret", "pages/{identity}/{id}", readRoles=["self"], writeRoles=["self"], bundle="pages"),
]
FORBIDDEN = (403, "Forbidden")


def grant(*paths: str, ops: tuple[str, ...] = ("read", "list", "write")) -> issuing.Grant:
    return issuing.Grant(ops, (*(paths or ("**",)), "!notebooks/_members", "!notebooks/_keyring"))


def member(issuer: IdentityKeys = ANNA, name: str = "notebooks", **options: Any) -> Certificate:
    """A certificate of the issuer for SUBJECT."""
    terms = {"grant": grant(), **minted_at(), **options}
    return issuing.issue_member_certificate(issuer, SUBJECT.ed_pub, SUBJECT.kem_pub, name, **terms)


def link(issuer: IdentityKeys = ANNA, **options: Any) -> Certificate:
    """A certificate of the issuer for anybody who has it."""
    terms = {"grant": grant(), **minted_at(), **options}
    return issuing.issue_audience_certificate(issuer, "notebooks", **terms)


class Site:
    """A service with callers of it."""

    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self.base, self._session = base, session
        self.anna = Signed(base, session, ANNA, root_device(ANNA))

    def guest(self, certificate: Certificate) -> Signed:
        """SUBJECT with a certificate that somebody else has issued."""
        return Signed(self.base, self._session, SUBJECT, certificate, presenter=not certificate.sub)


@pytest.fixture
async def site(start: Start, session: aiohttp.ClientSession) -> Site:
    return Site(await start({"collections": COLLECTIONS}), session)


def own(keys: IdentityKeys, id_: str = "a", name: str = "notebooks") -> str:
    return f"{name}/{keys.user_id}/{id_}"


async def statuses(guest: Signed, owner: IdentityKeys, id_: str = "a") -> dict[str, int]:
    """What a guest is answered on every route below the user id of `owner`."""
    key, photo = own(owner, id_), f"/push/{own(owner, id_, 'photos')}"
    png = {"Content-Type": "image/png", **guest.headers("POST", photo, b"")}  # which cover no body
    requests: dict[str, tuple[str, str, Any, dict[str, str]]] = {
        "pull": ("GET", f"/pull/{key}", None, {}),
        "history": ("GET", f"/history/{key}", None, {}),
        "list": ("GET", f"/list/notebooks/{owner.user_id}", None, {}),
        "hashes": ("GET", f"/list/notebooks/{owner.user_id}?hashes=true", None, {}),
        "push": ("POST", f"/push/{own(owner, 'new')}", {"data": {}, "baseHash": None}, {}),
        "delete": ("DELETE", f"/push/{own(owner, 'none')}?baseHash=", None, {}),
        "read log": ("GET", f"/pull/{own(owner, id_, 'diary')}?full=true", None, {}),
        "append": ("POST", f"/push/{own(owner, id_, 'diary')}", {"data": {}}, {}),
        "read file": ("GET", f"/pull/{own(owner, id_, 'photos')}", None, {}),
        "push file": ("POST", photo, b"png", png),
        "push to a bundle": ("POST", f"/push/{own(owner, id_, 'pages')}/title", {"data": {}}, {}),
    }
    return {name: (await guest.request(*request)).status for name, request in requests.items()}


READS = {"pull", "history", "list", "hashes", "read log", "read file"}


# What it gives


@pytest.mark.parametrize("issue", [member, link])
async def test_holder_of_a_certificate_of_the_owner_uses_every_route(site: Site, issue: Any) -> None:
    await site.anna.request(
        "POST", f"/push/{own(ANNA, name='photos')}", b"png", {"Content-Type": "image/png"}
    )
    found = await statuses(site.guest(issue()), ANNA)
    assert set(found.values()) == {200}, found
    assert (await site.anna.pull(own(ANNA, "new"))).json["hash"], "which wrote what is hers"


async def test_its_paths_and_operations_apply(site: Site) -> None:
    reader = await statuses(site.guest(member(grant=grant(ops=("read",)))), ANNA)
    assert {name for name, status in reader.items() if status in (200, 404)} == READS
    assert {status for name, status in reader.items() if name not in READS} == {403}
    narrow = site.guest(link(grant=grant(own(ANNA, "one"))))
    assert (await narrow.push(own(ANNA, "one"), {"n": 1})).status == 200
    assert set((await statuses(narrow, ANNA, "two")).values()) == {403}


async def test_bundle_has_the_members_that_are_shared(site: Site) -> None:
    for name in ("title", "body", "secret"):
        await site.anna.push(f"{own(ANNA, name='pages')}/{name}", {"is": name})
    pulled = await site.guest(member()).pull(own(ANNA, name="pages"))
    assert set(pulled.json["collections"]) == {"title", "body"}
    assert (await site.guest(member(BEN)).pull(own(ANNA, name="pages"))).json["collections"] == {}


async def test_batch_has_the_entries_of_the_issuer_and_of_the_caller(site: Site) -> None:
    await site.anna.push(own(ANNA), {"of": "anna"})
    sets = [{"identity": keys.user_id, "id": "a"} for keys in (ANNA, BEN, SUBJECT)]
    tails = orjson.dumps({"diary": [{"last": 1}] * 3}).decode()
    params = orjson.dumps({"notebooks": sets, "diary": sets}).decode()
    query = {"collections": "notebooks,diary", "params": params, "appendParams": tails}
    target = f"/batch/pull?{urlencode(query)}"
    for certificate in (member(), link()):
        found = (await site.guest(certificate).request("GET", target)).json["collections"]
        assert found["notebooks"][0]["data"] == {"of": "anna"}
        for name in ("notebooks", "diary"):
            assert [entry.get("error") for entry in found[name]] == [None, "Forbidden", None]
    narrow = await site.guest(link(grant=grant(own(ANNA, "b")))).request("GET", target)
    assert [entry.get("error") for entry in narrow.json["collections"]["notebooks"]] == ["Forbidden"] * 3


async def test_member_that_only_the_role_may_see_is_hidden_from_others(
    start: Start, session: aiohttp.ClientSession
) -> None:
    hidden = {"rate": {"readRoles": [SHARED], "writeRoles": [SHARED]}}
    public = collection("notebooks", "notebooks/{identity}/{id}", fieldPermissions=hidden)
    site = Site(await start({"collections": [public]}), session)
    guest = site.guest(member())
    assert (await guest.push(own(ANNA), {"rate": 1, "n": 1})).status == 200
    assert (await guest.pull(own(ANNA))).json["data"] == {"rate": 1, "n": 1}
    assert (await site.guest(member(BEN)).pull(own(ANNA))).json["data"] == {"n": 1}
    assert (await site.guest(member(BEN)).push(own(ANNA, "b"), {"rate": 1})).status == 403


# What it does not give


@pytest.mark.parametrize("issue", [member, link])
async def test_certificate_counts_below_its_issuer_alone(site: Site, issue: Any) -> None:
    await site.anna.push(own(ANNA), {"of": "anna"})
    assert set((await statuses(site.guest(issue(BEN)), ANNA)).values()) == {403}
    assert set((await statuses(site.guest(issue(ANNA)), BEN)).values()) == {403}
    assert (await site.anna.pull(own(ANNA))).json["data"] == {"of": "anna"}
    assert set(
        (
            await statuses(
                site.guest(issue(SUBJECT, aud=(SUBJECT.ed_pub,)) if issue is link else issue(BEN)), ANNA
            )
        ).values()
    ) == {403}


async def test_certificate_for_another_collection_does_not_count(site: Site) -> None:
    other = member(
        name="diary",
        grant=issuing.Grant(("read", "list", "write"), ("**", "!diary/_members", "!diary/_keyring")),
    )
    assert set((await statuses(site.guest(other), ANNA)).values()) == {403}


async def test_device_of_the_owner_has_the_role_of_the_owner_and_not_this_one(
    start: Start, session: aiohttp.ClientSession
) -> None:
    only = collection("notebooks", "notebooks/{identity}/{id}", readRoles=[SHARED], writeRoles=[SHARED])
    site = Site(await start({"collections": [only]}), session)
    terms = {"collections": ("notebooks",), **minted_at()}
    device = issuing.issue_device_certificate(ANNA, SUBJECT.ed_pub, SUBJECT.kem_pub, **terms)
    for caller in (site.anna, Signed(site.base, session, SUBJECT, device)):
        assert (await caller.pull(own(ANNA))).error == FORBIDDEN
        assert (await caller.push(own(ANNA), {})).error == FORBIDDEN
    assert (await site.guest(member()).push(own(ANNA), {})).status == 200


async def test_link_for_named_keys_admits_no_other_key(site: Site) -> None:
    assert set((await statuses(site.guest(link(aud=(SUBJECT.ed_pub,))), ANNA)).values()) <= {200, 404}
    assert set((await statuses(site.guest(link(aud=(STRANGER.ed_pub,))), ANNA)).values()) == {403}


async def test_trusted_issuers_neither_gain_nor_lose(start: Start, session: aiohttp.ClientSession) -> None:
    """The role needs no trust, and trust gives no role on the path of somebody else."""
    for trusted in ([BEN.ed_pub], []):
        members = {"collections": COLLECTIONS, "auth": {"trustedIssuers": trusted}}
        site = Site(await start(members), session)
        assert (await site.guest(member()).push(own(ANNA), {})).status == 200
        assert set((await statuses(site.guest(member(BEN)), ANNA)).values()) == {403}
    here = {**NOTEBOOKS, "trustedIssuers": [BEN.ed_pub]}
    site = Site(await start({"collections": [here]}), session)
    assert (await site.guest(member()).pull(own(ANNA))).status == 200
    assert (await site.guest(member(BEN)).pull(own(ANNA))).error == FORBIDDEN


async def test_revoked_certificate_and_revoked_key_are_rejected(site: Site) -> None:
    certificate, other = member(), link()
    guest = site.guest(certificate)
    assert (await guest.push(own(ANNA), {})).status == 200
    expiry = certificate.exp
    for generation, revoked in enumerate(
        ({"certificates": [certificate]}, {"subjects": [(SUBJECT.ed_pub, expiry)]}), 1
    ):
        text = issuing.issue_revocation_list(ANNA, generation, **revoked).text  # type: ignore[arg-type]
        assert (await site.anna.request("POST", "/revocations", text)).status == 200
        assert (await guest.pull(own(ANNA))).status == 401
        assert (await guest.push(own(ANNA), {})).status == 401
    assert (await site.guest(other).pull(own(ANNA))).status == 200
    text = issuing.issue_revocation_list(ANNA, 3, certificates=[other]).text
    assert (await site.anna.request("POST", "/revocations", text)).status == 200
    assert (await site.guest(other).pull(own(ANNA))).status == 401


async def test_expired_certificate_is_rejected(start: Start, session: aiohttp.ClientSession) -> None:
    clock = FakeClock(wall_clock_ms())
    site = Site(await start({"collections": COLLECTIONS}, now_ms=clock), session)
    guest = site.guest(member(expires_at_s=clock.now_ms // 1000 + 60))
    assert (await guest.pull(own(ANNA))).status == 200
    clock.now_ms = guest.ts_ms = clock.now_ms + 361_000
    assert (await guest.pull(own(ANNA))).status == 401


async def test_list_of_identities_is_not_shared(start: Start, session: aiohttp.ClientSession) -> None:
    """Its path has no identity, so it is of nobody."""
    profiles = collection("profiles", "profiles/{identity}", **ROLES, listable=True)
    site = Site(await start({"collections": [profiles]}), session)
    guest = site.guest(member())
    assert (await guest.push(f"profiles/{ANNA.user_id}", {"name": "Anna"})).status == 200
    assert (await guest.request("GET", "/list/profiles")).error == FORBIDDEN
    assert (await guest.request("GET", "/list/profiles?hashes=true")).error == FORBIDDEN


async def test_restriction_stops_the_guest_that_it_names(
    start: Start, session: aiohttp.ClientSession
) -> None:
    denied = {**NOTEBOOKS, "restrictions": [{"mode": "deny", "identities": [SUBJECT.user_id]}]}
    site = Site(await start({"collections": [denied]}), session)
    assert (await site.guest(member()).pull(own(ANNA))).error == FORBIDDEN
    assert (await site.anna.pull(own(ANNA))).status == 200


@pytest.mark.parametrize("restriction", [{"mode": "deny", "identities": [ANNA.user_id]}, {"mode": "allow"}])
async def test_owner_who_is_restricted_lets_nobody_in(
    start: Start, session: aiohttp.ClientSession, restriction: dict[str, Any]
) -> None:
    allowed = {"identities": [BEN.user_id, SUBJECT.user_id], **restriction, "actions": ["pull", "list"]}
    site = Site(await start({"collections": [{**NOTEBOOKS, "restrictions": [allowed]}]}), session)
    for certificate in (member(), link()):
        found = await statuses(site.guest(certificate), ANNA)
        assert [found[name] for name in ("pull", "history", "list", "delete")] == [403, 403, 403, 200]
    assert (await site.guest(member(BEN)).pull(own(BEN))).status == 200
    assert (await site.guest(member()).pull(own(SUBJECT))).status == 200
    assert (await pages(site.guest(member()))).keys == []


async def test_role_of_one_issuer_stays_what_it_was(start: Start, session: aiohttp.ClientSession) -> None:
    """`delegated:<user id>:NAME` counts below every user id, and no other certificate does."""
    of_anna = {**NOTEBOOKS, "readRoles": [f"delegated:{ANNA.user_id}:notebooks"]}
    site = Site(await start({"collections": [of_anna]}), session)
    assert (await site.guest(member(ANNA)).pull(own(BEN))).status == 200
    assert (await site.guest(member(BEN)).pull(own(BEN))).error == FORBIDDEN


async def test_link_to_a_notebook_of_the_example_shows_no_earlier_version(
    start: Start, session: aiohttp.ClientSession
) -> None:
    every = json.loads(EXAMPLE.read_text())["collections"]
    notebooks = [each for each in every if each["name"] == "notebooks"]
    site = Site(await start({"collections": notebooks}), session)
    version = (await site.anna.push(own(ANNA), {"n": 1})).json["hash"]
    await site.anna.push(own(ANNA), {"n": 2}, version)
    for caller, status in ((site.anna, 200), (site.guest(link()), 403)):
        assert (await caller.pull(own(ANNA))).json["data"] == {"n": 2}
        for target in (f"/history/{own(ANNA)}", f"/pull/{own(ANNA)}?version={version}"):
            assert (await caller.request("GET", target)).status == status


# Changes


async def test_stream_and_pages_have_the_changes_of_the_issuer_and_of_the_caller(
    site: Site, session: aiohttp.ClientSession, subscribe: Listen
) -> None:
    subject = Signed(site.base, session, SUBJECT, root_device(SUBJECT))
    ben = Signed(site.base, session, BEN, root_device(BEN))
    guest, of_ben = site.guest(link()), site.guest(link(BEN))
    streams = [await subscribe(guest, collections="notebooks", params=values) for values in (None, of(ANNA))]
    for writer in (ben, site.anna, subject):
        await writer.push(own(writer.keys), {"n": 1})
    own_change = {"identity": SUBJECT.user_id, "id": "a"}
    shared_change = {**of(ANNA)["notebooks"], "id": "a"}
    assert [event["params"] for event in await streams[0].events(2)] == [shared_change, own_change]
    assert [event["params"] for event in await streams[1].events(1)] == [shared_change]
    assert (await pages(guest)).keys == [own(ANNA), own(SUBJECT)]
    assert (await pages(guest, collections="notebooks", params=of(ANNA))).keys == [own(ANNA)]
    assert (await pages(of_ben)).keys == [own(BEN), own(SUBJECT)]
    for query in ("/events", "/changes"):
        target = (
            f"{query}?{urlencode({'collections': 'notebooks', 'params': orjson.dumps(of(ANNA)).decode()})}"
        )
        assert (await of_ben.request("GET", target)).error == FORBIDDEN
        blind = site.guest(link(grant=grant(ops=("write",))))
        assert (await blind.request("GET", target)).error == FORBIDDEN


def of(keys: IdentityKeys) -> dict[str, dict[str, str]]:
    return {"notebooks": {"identity": keys.user_id}}


async def test_stream_has_what_the_paths_of_the_certificate_allow(site: Site, subscribe: Listen) -> None:
    guest = site.guest(link(grant=grant(own(ANNA, "shown"))))
    stream = await subscribe(guest, collections="notebooks", params=of(ANNA))
    for id_ in ("hidden", "shown"):
        await site.anna.push(own(ANNA, id_), {"n": 1})
    assert (await stream.events(1))[0]["params"]["id"] == "shown"
    assert (await pages(guest, collections="notebooks", params=of(ANNA))).keys == [own(ANNA, "shown")]


async def test_stream_ends_when_the_certificate_is_revoked(
    start: Start, session: aiohttp.ClientSession, subscribe: Listen
) -> None:
    clock = FakeClock(wall_clock_ms())
    site = Site(await start({"collections": COLLECTIONS}, now_ms=clock), session)
    certificate = member()
    stream = await subscribe(site.guest(certificate), collections="notebooks", params=of(ANNA))
    text = issuing.issue_revocation_list(ANNA, 1, certificates=[certificate]).text
    assert (await site.anna.request("POST", "/revocations", text)).status == 200
    clock.now_ms += 1_000
    await site.anna.push(own(ANNA), {"n": 1})
    assert all(block.data is None for block in await stream.rest())


# What else depends on it


async def test_manifest_shows_the_collection_to_its_holder(
    start: Start, session: aiohttp.ClientSession
) -> None:
    only = {**NOTEBOOKS, "readRoles": [SHARED], "writeRoles": [SHARED]}
    members = {"collections": [only], "configEndpoint": {"auth": "role-filtered"}}
    site = Site(await start(members), session)
    for caller, names in (
        (site.guest(member()), ["notebooks"]),
        (site.guest(link()), ["notebooks"]),
        (site.anna, []),
    ):
        shown = (await caller.request("GET", "/config")).json["collections"]
        assert [found["name"] for found in shown] == names


@pytest.mark.parametrize("store", ["file:{}", "memory:"])
async def test_what_a_guest_writes_counts_for_who_let_it_in(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, store: str
) -> None:
    members = {"quotas": {"identity": {"documents": 2}}, "store": store.format(tmp_path)}
    site = Site(await start({"collections": COLLECTIONS, **members}), session)
    guest = site.guest(member())
    assert [(await guest.push(own(ANNA, id_), {})).status for id_ in "abc"] == [200, 200, 507]
    assert (await guest.push(own(SUBJECT), {})).status == 200, "which is the guest's own"
    usage = (await site.anna.request("GET", "/usage")).json
    assert usage["used"]["documents"] == 2
