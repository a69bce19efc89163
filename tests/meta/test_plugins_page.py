"""What docs/reference/plugins.md shows works."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, Browser, Signed, root_device

from pysync.plugins.hooks import implements
from pysync.plugins.loader import HOOKS

PAGE = (Path(__file__).parents[2] / "docs/reference/plugins.md").read_text()


def shown(language: str) -> str:
    """The first block in this language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.S)
    assert found is not None
    return found[1]


def test_every_hook_is_documented() -> None:
    for hook in HOOKS:
        assert re.search(rf"^\| `(async )?{hook}\b", PAGE, re.M)
        assert f"**`{hook}`**" in PAGE


@pytest.mark.process
async def test_the_example_does_what_the_page_says(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    (tmp_path / "teams.py").write_text(shown("python"))
    (tmp_path / "pysync.json").write_text(shown("json"))
    environ = {**os.environ, "ADMIN_TOKEN": "a-secret-of-the-operator"}
    checked = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", "check", "pysync.json",
        cwd=tmp_path, env=environ, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await checked.wait() == 0
    log = tmp_path / "log"
    with log.open("wb") as errors:
        served = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pysync", "serve", "--config", str(tmp_path / "pysync.json"), "--port", "0",
            cwd=tmp_path, env=environ, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    try:
        assert served.stdout is not None
        base = (await served.stdout.readline()).decode().split(" at ")[1].strip()
        member, other = (Signed(base, session, keys, root_device(keys)) for keys in (ISSUER, STRANGER))
        assert (await member.push("pages/red/plan", {"n": 1})).error == (403, "Forbidden")
        bearer = {"Authorization": "Bearer a-secret-of-the-operator"}
        team = {"members": [ISSUER.user_id]}
        assert (await Browser(base, session).push("teams/red", team, headers=bearer)).status == 200
        assert (await member.push("pages/red/plan", {"n": 1})).status == 200
        assert (await member.pull("pages/red/plan")).json["data"] == {"n": 1}
        assert (await member.pull("pages/blue/plan")).error == (403, "Forbidden")
        assert (await other.pull("pages/red/plan")).error == (403, "Forbidden")
        served.terminate()
        assert await served.wait() == 0
    finally:
        if served.returncode is None:
            served.kill()
            await served.wait()
    messages = [json.loads(line)["message"] for line in log.read_text().splitlines()]
    assert f"{ISSUER.user_id} wrote plan of red" in messages


def test_the_example_has_the_hooks_that_it_seems_to_have() -> None:
    names: dict[str, type] = {}
    exec(shown("python"), names)
    plugin = names["Teams"]()
    assert [hook for hook in HOOKS if implements(plugin, hook)] == ["authorize", "after_write", "lifespan"]
