"""Each model of docs/how-to/choose-an-access-model.md admits and refuses those that the page says."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.cli_runner import Shell
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, root_device

from pysync.auth import certificates
from pysync.auth.identity_keys import IdentityKeys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/choose-an-access-model.md").read_text()
TOKEN = "a-token-of-the-operator"


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def configured(heading: str) -> dict[str, Any]:
    """The configuration that the page shows below this heading, with real values for its placeholders."""
    (shown,) = re.findall(r"```json title.*?\n(.*?)```", section(heading), re.S)
    members: dict[str, Any] = json.loads(shown.replace("${ISSUER}", ISSUER.ed_pub))
    if heading == "Open":
        members["auth"] = {"adminToken": TOKEN}
    return members


async def people(
    start: Start, session: aiohttp.ClientSession, members: dict[str, Any]
) -> tuple[Browser, Signed, Signed, Signed]:
    """An anonymous caller, then the issuer, a subject and a stranger, each with a device of their own."""
    url = await start(members)
    signed = (Signed(url, session, keys, root_device(keys)) for keys in (ISSUER, SUBJECT, STRANGER))
    return Browser(url, session), *signed  # type: ignore[return-value]


async def test_an_open_collection_is_read_by_all_and_written_by_the_operator(
    start: Start, session: aiohttp.ClientSession
) -> None:
    anyone, _, _, stranger = await people(start, session, configured("Open"))
    operator = {"Authorization": f"Bearer {TOKEN}"}
    assert (await anyone.push("pages/p1", {"n": 1})).status == 401
    assert (await stranger.push("pages/p1", {"n": 1})).status == 403
    assert (await anyone.push("pages/p1", {"n": 1}, headers=operator)).status == 200
    assert (await anyone.pull("pages/p1")).json["data"] == {"n": 1}


async def test_an_owner_only_collection_is_reached_by_its_owner(
    start: Start, session: aiohttp.ClientSession
) -> None:
    anyone, owner, _, stranger = await people(start, session, configured("Owner only"))
    key = f"users/{ISSUER.user_id}/settings"
    assert (await owner.push(key, {"n": 1})).status == 200
    assert (await owner.pull(key)).json["data"] == {"n": 1}
    assert (await anyone.pull(key)).status == 401
    assert [(await stranger.pull(key)).status, (await stranger.push(key, {})).status] == [403, 403]


async def test_owner_lets_in_those_to_whom_it_gives_certificates(
    start: Start,
    session: aiohttp.ClientSession,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anyone, owner, friend, stranger = await people(start, session, configured("Share by certificates"))
    monkeypatch.setenv("PYSYNC_URL", anyone.base)
    monkeypatch.setenv("ME", ISSUER.user_id)
    for name, keys in (("me", ISSUER), ("bob", SUBJECT)):
        keys.save(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.pub").write_text(shell.run("keys", "show", f"{name}.json")[1])
    text = section("Share by certificates").replace("$ME", ISSUER.user_id)
    lines = re.findall(r"^(?:echo '(.*?)' \| )?pysync ((?!serve).*)", text, re.M)
    assert len(lines) == 3
    for stdin, line in lines:
        status, shown, errors = await shell.run_async(*shlex.split(line), stdin=stdin)
        assert (status, errors) == (0, "")
    assert json.loads(shown) == {"title": "Holiday"}
    holiday, other = (f"notebooks/{ISSUER.user_id}/{name}" for name in ("holiday", "other"))
    for rejected in (
        await friend.pull(holiday),
        await stranger.pull(holiday),
        await stranger.push(other, {}),
    ):
        assert rejected.status == 403
    assert (await owner.push(other, {})).status == 200
    certificate = certificates.parse((tmp_path / "bob.cap").read_bytes())
    guest = Signed(anyone.base, session, SUBJECT, certificate)
    assert [(await guest.pull(other)).status, (await guest.push(holiday, {})).status] == [403, 403]


@pytest.mark.parametrize("shipped", [False, True])
async def test_space_admits_those_whom_its_owner_lists(
    start: Start, session: aiohttp.ClientSession, shipped: bool
) -> None:
    members = configured("Spaces")
    if shipped:
        example = json.loads((ROOT / "deploy/example.json").read_text())
        members = {name: example[name] for name in ("auth", "collections")}
    anyone, owner, friend, stranger = await people(start, session, members)
    access, room = "rooms/r1/_access", "rooms/r1/doc"
    listed = {"owner": ISSUER.user_id, "members": [SUBJECT.user_id]}
    made = await owner.push(access, listed)
    assert made.status == 200
    assert (await owner.push(room, {"topic": "lunch"})).status == 200
    assert (await friend.pull(room)).json["data"] == {"topic": "lunch"}
    assert (await anyone.pull(room)).status == 401
    taken_over = {"owner": STRANGER.user_id, "members": []}
    for rejected in (
        await stranger.pull(room),
        await stranger.push(room, {"topic": "mine"}),
        await stranger.push(access, taken_over),
        await stranger.push(access, taken_over, base=made.json["hash"]),
        await friend.push(access, taken_over, base=made.json["hash"]),
    ):
        assert rejected.status == 403
    await owner.push(access, {**listed, "members": []}, base=made.json["hash"])
    assert (await friend.pull(room)).status == 403


async def test_trusted_issuers_are_admitted_as_the_page_says_and_others_are_not(
    start: Start,
    session: aiohttp.ClientSession,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anyone, _, _, stranger = await people(start, session, configured("Trusted issuers"))
    monkeypatch.setenv("PYSYNC_URL", anyone.base)
    for name, keys in (("me", ISSUER), ("bob", IdentityKeys.generate())):
        keys.save(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.pub").write_text(shell.run("keys", "show", f"{name}.json")[1])
    lines = re.findall(r"^(?:echo '(.*?)' \| )?pysync ((?!serve).*)", section("Trusted issuers"), re.M)
    assert len(lines) == 4
    for stdin, line in lines:
        status, _, errors = await shell.run_async(*shlex.split(line), stdin=stdin)
        assert (status, errors) == (0, "")
    own = root_device(STRANGER, collections=("plans",))
    selfmade = Signed(anyone.base, session, STRANGER, own)
    for rejected in (await stranger.pull("plans/p1"), await selfmade.pull("plans/p1")):
        assert rejected.status == 403
