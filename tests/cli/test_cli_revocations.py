"""`pysync cap revoke`: lists grow, keys can be taken back, and nothing revoked comes back by itself."""

import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from support.cli_runner import Shell
from support.clients import ISSUER, SUBJECT, Browser, Start
from support.collections import collection
from support.fake_server import serving

from pysync._core import canonicalize
from pysync.auth import certificates, issuing
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client
from pysync.store.memory import MemoryStore

BOARD = collection("board", readRoles=["cap:read:board"], writeRoles=["cap:write:board"])
SERVICE = {"collections": [BOARD]}
LATER_S = int(time.time()) + 86_400


async def guests(shell: Shell, *names: str) -> None:
    """An owner's keys, and certificates of the owner's for guests, each in a file of its name."""
    shell.json("keys", "new", "--out", "owner.json")
    for name in names:
        shell.json("keys", "new", "--out", f"{name}.json")
        made = ("--key", "owner.json", "--to", f"{name}.json", "--out", f"{name}.cap")
        assert shell.run("cap", "member", "board", *made)[0] == 0


async def reads(shell: Shell, name: str, server: tuple[str, str]) -> int:
    used = ("--key", f"{name}.json", "--cap", f"{name}.cap", *server)
    return (await shell.run_async("pull", "board/b1", *used))[0]


REVOKE = ("cap", "revoke", "--key", "owner.json", "--publish")


async def test_a_published_list_is_answered_to_anybody(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start(SERVICE)
    browser = Browser(base, session)
    path = f"/revocations/{ISSUER.user_id}"
    assert (await browser.request("GET", path)).error == (404, "Not found")
    text = issuing.issue_revocation_list(ISSUER, 3, subjects=[(SUBJECT.ed_pub, LATER_S)]).text
    assert (await browser.request("POST", "/revocations", text)).status == 200
    answer = await browser.request("GET", path)
    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (200, text, "application/json")
    assert (await browser.request("HEAD", path)).headers["Content-Length"] == str(len(text))
    assert (await browser.request("GET", "/revocations/nobody")).status == 404
    assert (await browser.request("POST", path, text)).status == 405
    async with Client(base) as client:
        listed = await client.revocations(ISSUER.user_id)
        assert listed is not None
        assert (listed.generation, listed.text) == (3, text)
        assert await client.revocations(SUBJECT.user_id) is None


async def test_a_second_revocation_keeps_the_first_and_raises_the_generation(
    shell: Shell, start: Start
) -> None:
    server = ("--server", await start(SERVICE))
    await guests(shell, "bob", "eve", "ann")
    assert [await reads(shell, name, server) for name in ("bob", "eve", "ann")] == [0, 0, 0]
    for generation, name in ((1, "bob"), (2, "eve")):
        status, output, errors = await shell.run_async(*REVOKE, f"{name}.cap", *server)
        assert (status, errors, json.loads(output)["generation"]) == (0, "", generation)
    assert [await reads(shell, name, server) for name in ("bob", "eve", "ann")] == [4, 4, 0]
    status, output, _ = await shell.run_async(*REVOKE, "bob.cap", *server)
    assert (status, len(json.loads(output)["revoked"])) == (0, 2), "nothing is named twice"


async def test_a_key_is_taken_back_with_all_that_it_holds(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    await guests(shell, "bob", "ann")
    _, public, _ = shell.run("keys", "show", "bob.json")
    Path("bob.pub").write_text(public)
    status, output, errors = await shell.run_async(*REVOKE, "--subject", "bob.pub", *server)
    assert (status, errors) == (0, "")
    assert [entry["sub"] for entry in json.loads(output)["revokedSubjects"]] == [json.loads(public)["edPub"]]
    assert [await reads(shell, name, server) for name in ("bob", "ann")] == [4, 0]
    assert (await shell.run_async(*REVOKE, "ann.cap", *server))[0] == 0
    assert [await reads(shell, name, server) for name in ("bob", "ann")] == [4, 4]


class OvertakenStore(MemoryStore):
    """Another publishes its own list first, each time that a list is about to be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = list[bytes]()

    async def put(self, key: str, *args: Any, **options: Any) -> str:
        if "/revocations/" in key and self.lists:
            await super().put(key, self.lists.pop())
        return await super().put(key, *args, **options)


async def test_a_list_that_another_publishes_meanwhile_is_merged_with(shell: Shell, start: Start) -> None:
    store = OvertakenStore()
    base = await start(SERVICE, store=store)
    await guests(shell, "bob", "eve")
    owner = IdentityKeys.from_json(Path("owner.json").read_bytes())
    store.lists = [issuing.issue_revocation_list(owner, 7, subjects=[("0" * 64, LATER_S)]).text]
    status, output, errors = await shell.run_async(*REVOKE, "bob.cap", "--server", base)
    assert store.lists == []
    printed = json.loads(output)
    assert (status, errors, printed["generation"]) == (0, "", 8)
    assert (len(printed["revoked"]), len(printed["revokedSubjects"])) == (1, 1)


def test_a_merge_keeps_what_it_does_not_understand() -> None:
    old, kept = int(time.time()) - 10 * 86_400, int(time.time()) + 60
    issued = [
        issuing.issue_audience_certificate(ISSUER, "x", now_s=at - 60, expires_at_s=at, nonce=bytes([n]) * 16)
        for n, at in enumerate((old, kept))
    ]
    subjects = [("1" * 64, 0), ("2" * 64, -5), ("3" * 64, old)]
    known = orjson.loads(
        issuing.issue_revocation_list(ISSUER, 3, certificates=issued, subjects=subjects).text
    )
    unknown = {**known, "generation": 4, "note": "of a later version"}
    signed = ISSUER.sign(certificates.signing_input(certificates.REVOCATION_TAG, unknown))
    earlier = certificates.parse_revocation_list(canonicalize(orjson.dumps({**unknown, "sig": signed})))
    merged = issuing.issue_revocation_list(
        ISSUER, 5, subjects=[("4" * 64, kept)], earlier=earlier, now_s=int(time.time())
    )
    members = orjson.loads(merged.text)
    assert (members["generation"], members["note"]) == (5, "of a later version")
    assert [entry["nonce"] for entry in members["revoked"]] == [issued[1].nonce]
    assert [entry["sub"][0] for entry in members["revokedSubjects"]] == ["1", "2", "4"]


async def test_a_list_can_be_replaced_on_purpose(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    await guests(shell, "bob", "eve")
    assert (await shell.run_async(*REVOKE, "bob.cap", *server))[0] == 0
    assert (await shell.run_async(*REVOKE, "--replace", "eve.cap", *server))[0] == 0
    assert [await reads(shell, name, server) for name in ("bob", "eve")] == [0, 4]


async def test_a_certificate_is_shown_as_revoked_where_a_server_says_so(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    await guests(shell, "bob")
    status, output, _ = await shell.run_async("cap", "show", "bob.cap", *server)
    assert (status, json.loads(output)["verdict"]) == (0, "ok")
    await shell.run_async(*REVOKE, "bob.cap", *server)
    status, output, _ = await shell.run_async("cap", "show", "bob.cap", *server)
    assert (status, json.loads(output)["verdict"]) == (1, "revoked")
    assert shell.run("cap", "show", "bob.cap")[0] == 0, "nobody is asked without --server"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to revoke: pass certificates, or a key with --subject"),
        (("bob.cap",), "pass --generation, or --publish to take the next one from the server"),
        (("--replace", "bob.cap", "--generation", "1"), "--replace needs --publish"),
    ],
)
async def test_incomplete_revocation_is_reported(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    await guests(shell, "bob")
    assert shell.run("cap", "revoke", "--key", "owner.json", *arguments) == (1, "", f"pysync: {said}\n")


async def test_a_stored_list_that_cannot_be_read_is_replaced(shell: Shell, start: Start) -> None:
    store = MemoryStore()
    server = ("--server", await start(SERVICE, store=store))
    await guests(shell, "bob")
    key = f"_pysync/revocations/{IdentityKeys.from_json(Path('owner.json').read_bytes()).user_id}"
    await store.put(key, b"garbage")
    status, _, errors = await shell.run_async(*REVOKE, "bob.cap", *server)
    assert (status, errors) == (0, "")
    assert await reads(shell, "bob", server) == 4


async def test_a_list_of_somebody_else_is_not_merged(shell: Shell) -> None:
    await guests(shell, "bob")
    other_issuers = issuing.issue_revocation_list(ISSUER, 1, subjects=[("0" * 64, LATER_S)])
    async with serving((200, other_issuers.text)) as server:
        status, output, errors = await shell.run_async(*REVOKE, "bob.cap", "--server", server.url)
    assert (status, output) == (1, "")
    assert errors == "pysync: the server answers with the revocation list of another issuer\n"
