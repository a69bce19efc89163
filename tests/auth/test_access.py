"""Who may do what: certificates over time, roles by kind and issuer, scopes, restrictions, revocation."""

from typing import Any

import aiohttp
import orjson
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, minted_at, root_device
from support.collections import MINE, ROOMS, collection

from pysync._core import canonicalize, content_hash
from pysync.auth import certificates, issuing
from pysync.auth.certificates import Certificate
from pysync.clock import wall_clock_ms
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

OPEN = collection("open")
FORBIDDEN = (403, "Forbidden")


def labelled(length: int) -> Certificate:
    """A certificate of SUBJECT's root device whose Authorization header has `length` characters."""
    own = {name: value for name, value in orjson.loads(root_device(SUBJECT).text).items() if name != "sig"}
    text_bytes = (length - len(certificates.SCHEME)) // 4 * 3

    def signed(label: str) -> Certificate:
        members = own | {"label": label}
        sig = SUBJECT.sign(certificates.signing_input(certificates.CERTIFICATE_TAG, members))
        return certificates.parse(canonicalize(orjson.dumps(members | {"sig": sig})))

    certificate = signed("x" * (text_bytes - len(signed("").text)))
    assert len(certificate.authorization) == length
    return certificate


async def test_a_certificate_met_before_is_rejected_once_it_has_expired(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = FakeClock(wall_clock_ms())
    base = await start({"collections": [MINE]}, now_ms=clock)
    certificate = root_device(SUBJECT, expires_at_s=clock.now_ms // 1000 + 60)
    caller = Signed(base, session, SUBJECT, certificate)

    async def pull_at(now_ms: int) -> int:
        clock.now_ms = caller.ts_ms = now_ms
        return (await caller.pull(f"u/{SUBJECT.user_id}/a")).status

    assert await pull_at(clock.now_ms) == 200
    assert await pull_at((certificate.exp + 300) * 1000) == 200, "clocks may differ by 300 s"
    assert await pull_at((certificate.exp + 301) * 1000) == 401


@pytest.mark.parametrize(("length", "status"), [(8192, 200), (8196, 401)])
async def test_an_authorization_header_has_at_most_8192_characters(
    start: Start, session: aiohttp.ClientSession, length: int, status: int
) -> None:
    caller = Signed(await start({"collections": [MINE]}), session, SUBJECT, labelled(length))
    assert (await caller.pull(f"u/{SUBJECT.user_id}/a")).status == status


async def test_only_the_owners_devices_hold_the_owners_admin_role(
    start: Start, session: aiohttp.ClientSession
) -> None:
    roles = [f"admin:{ISSUER.user_id}"]
    owned = {"name": "owned", "storagePath": "owned/{id}", "readRoles": roles, "writeRoles": roles}
    base = await start({"collections": [{**owned, "requireAuth": True}]})
    grant = issuing.writer_grant("owned")
    device = issuing.issue_device_certificate(ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, **minted_at())
    member = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "owned", grant=grant, **minted_at()
    )
    audience = issuing.issue_audience_certificate(ISSUER, "owned", grant=grant, **minted_at())
    assert (await Signed(base, session, SUBJECT, device).pull("owned/a")).status == 200
    for delegate in (
        Signed(base, session, SUBJECT, member),
        Signed(base, session, SUBJECT, audience, presenter=True),
    ):
        assert (await delegate.pull("owned/a")).error == FORBIDDEN
        assert (await delegate.push("owned/a", {})).error == FORBIDDEN


@pytest.mark.parametrize(("trusted", "status"), [(STRANGER, 200), (ISSUER, 403)])
async def test_only_a_trusted_issuer_delegates(
    start: Start, session: aiohttp.ClientSession, trusted: Any, status: int
) -> None:
    roles = [f"delegated:{STRANGER.user_id}:shared"]
    shared = {"name": "shared", "storagePath": "shared/{identity}/{id}", "readRoles": roles}
    members = {"auth": {"trustedIssuers": [trusted.ed_pub]}, "collections": [{**shared, "pullOnly": True}]}
    base = await start(members)
    certificate = issuing.issue_member_certificate(
        STRANGER, SUBJECT.ed_pub, SUBJECT.kem_pub, "shared", **minted_at()
    )
    delegate = Signed(base, session, SUBJECT, certificate)
    assert (await delegate.pull(f"shared/{STRANGER.user_id}/a")).status == status


@pytest.mark.parametrize(("path", "is_folded"), [("rooms/**", True), ("rooms/a", False)])
async def test_a_keyring_that_no_collection_owns_is_folded_within_the_scope_alone(
    start: Start, session: aiohttp.ClientSession, path: str, is_folded: bool
) -> None:
    store = MemoryStore()
    keyring = b'{"v":1,"ts":1,"hash":"%b","data":{"k":1}}' % content_hash(b'{"k":1}').encode()
    await store.put("rooms/a/_keyring", keyring)
    base = await start({"collections": [ROOMS]}, store=store)
    grant = issuing.Grant(("read",), (path, "!rooms/_members"))
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=grant, **minted_at()
    )
    answer = await Signed(base, session, SUBJECT, certificate).request("GET", "/pull/rooms/a?withKeyring=1")
    assert answer.status == 200
    assert ("keyring" in answer.json) is is_folded
    assert not is_folded or answer.json["keyring"]["data"] == {"k": 1}


DENY = {"mode": "deny", "identities": [SUBJECT.user_id]}
ALLOW = {"mode": "allow", "identities": [SUBJECT.user_id]}


async def statuses(base: str, session: aiohttp.ClientSession) -> dict[str, tuple[int, int]]:
    """What SUBJECT and STRANGER are answered, at the root and in the namespace."""
    subject = Signed(base, session, SUBJECT, root_device(SUBJECT))
    stranger = Signed(base, session, STRANGER, root_device(STRANGER))
    return {
        prefix: (
            (await subject.request("GET", f"{prefix}/pull/open/a")).status,
            (await stranger.request("GET", f"{prefix}/pull/open/a")).status,
        )
        for prefix in ("", "/acme")
    }


@pytest.mark.parametrize(
    ("of_server", "of_namespace", "root", "inside"),
    [
        ([DENY], [], (403, 200), (403, 200)),
        ([ALLOW], [], (200, 403), (200, 403)),
        ([], [DENY], (200, 200), (403, 200)),
        ([], [ALLOW], (200, 200), (200, 403)),
        ([DENY], [ALLOW], (403, 200), (403, 403)),
        ([DENY | {"actions": ["push"]}], [], (200, 200), (200, 200)),
    ],
)
async def test_restrictions_of_the_server_hold_everywhere_and_of_a_namespace_inside_it(
    start: Start,
    session: aiohttp.ClientSession,
    of_server: list[Any],
    of_namespace: list[Any],
    root: tuple[int, int],
    inside: tuple[int, int],
) -> None:
    namespace = {"collections": [OPEN], "restrictions": of_namespace}
    members = {"collections": [OPEN], "namespaces": {"acme": namespace}, "restrictions": of_server}
    assert await statuses(await start(members), session) == {"": root, "/acme": inside}


async def test_a_revocation_is_honoured_by_every_node_within_5_seconds(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock, store = FakeClock(wall_clock_ms()), MemoryStore()
    here, there = [await start({"collections": [MINE]}, store=store, now_ms=clock) for _ in range(2)]
    certificate = root_device(SUBJECT)
    callers = [Signed(node, session, SUBJECT, certificate, ts_ms=clock.now_ms) for node in (here, there)]
    key = f"u/{SUBJECT.user_id}/a"
    assert [(await caller.pull(key)).status for caller in callers] == [200, 200]
    listed = issuing.issue_revocation_list(SUBJECT, 1, certificates=[certificate])
    assert (await Browser(here, session).request("POST", "/revocations", listed.text)).status == 200
    assert (await callers[0].pull(key)).status == 401, "at once where it was published"
    clock.now_ms += 5000
    assert (await callers[1].pull(key)).status == 401
