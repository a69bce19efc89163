"""A page and the npm client of the protocol edit one document of the same person, and nothing is lost."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.browser import Chromium, Window
from support.clients import Start
from support.collections import OWN, collection
from support.configurations import ROOT
from support.web_pages import blank_page, web_service

from pysync.auth.identity_keys import IdentityKeys

PASSPHRASE = "correct horse battery staple"
# With the merge of docs/how-to/migrate-from-starfish.md. Does what each line says, and answers with the data.
PROGRAM = """
import { createInterface } from "node:readline";
import { StarfishClient } from "@drakkar.software/starfish-client";
import { bootstrapRootIdentity } from "@drakkar.software/starfish-identities";
import { SharedDocument } from "./merge.mjs";

const [baseUrl, path] = process.argv.slice(2);
const me = await bootstrapRootIdentity("PASSPHRASE");
const client = new StarfishClient({
  baseUrl,
  capProvider: { getCap: async () => ({ cap: me.capCert, devEdPrivHex: me.device.edPriv }) },
});
const document = new SharedDocument({ client, pullPath: `/pull/${path}`, pushPath: `/push/${path}` });
for await (const line of createInterface({ input: process.stdin })) {
  const data = JSON.parse(line);
  await (data ? document.push(data) : document.pull());
  console.log(JSON.stringify(document.sync.getData()));
}
"""


class NpmClient:
    """A process with the published client."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def pull(self) -> dict[str, Any]:
        return await self._say(None)

    async def push(self, data: dict[str, Any]) -> dict[str, Any]:
        return await self._say(data)

    async def _say(self, data: dict[str, Any] | None) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(data).encode() + b"\n")
        said: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return said


@asynccontextmanager
async def npm_client(starfish_npm: Path, folder: Path, *args: str) -> AsyncIterator[NpmClient]:
    page = (ROOT / "docs/how-to/migrate-from-starfish.md").read_text()
    merge = re.search(r'^```js title="merge.mjs"\n(.*?)^```', page, re.M | re.S)
    assert merge is not None
    (folder / "merge.mjs").write_text(merge[1])
    (folder / "client.mjs").write_text(PROGRAM.replace("PASSPHRASE", PASSPHRASE))
    (folder / "node_modules").symlink_to(starfish_npm)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "node", "client.mjs", *args, cwd=folder, stdin=pipe, stdout=pipe
    )
    try:
        yield NpmClient(process)
    finally:
        process.kill()
        await process.wait()


async def own_document(window: Window, keys: IdentityKeys, key: str) -> None:
    script = """async (ed, kem, key) => {
      const keys = await pysync.IdentityKeys.fromPrivate(ed, kem)
      window.doc = new pysync.SyncDocument(new pysync.Client(location.origin, { keys }), key)
      await doc.pull()
    }"""
    await window.run(script, keys.ed_priv, keys.kem_priv, key)


@pytest.mark.process
@pytest.mark.slow
async def test_page_and_the_npm_client_edit_one_document(
    start: Start, screen: Chromium, starfish_npm: Path, tmp_path: Path
) -> None:
    me = IdentityKeys.from_passphrase(PASSPHRASE)
    key = f"users/{me.user_id}/settings"
    base = await web_service(start, collection("settings", "users/{identity}/settings", **OWN))
    window = await blank_page(screen, base)
    await own_document(window, me, key)
    async with npm_client(starfish_npm, tmp_path, base, key) as npm:
        assert await npm.push({"title": "x", "items": ["milk"]}) == {"title": "x", "items": ["milk"]}
        assert await window.run("doc.pull()") == {"title": "x", "items": ["milk"]}

        # Each has a conflict with what the other has pushed.
        await window.run("{ doc.data.page = 1; doc.push() }")
        both = await npm.push({"title": "x", "items": ["milk", "bread"], "npm": 1})
        assert both == {"title": "x", "items": ["milk", "bread"], "npm": 1, "page": 1}
        await window.run("{ doc.data.title = 'y'; doc.push() }")
        assert await window.run("doc.data") == {**both, "title": "y"}
        assert await window.run("doc.dropped") == []

        # At the same time, again and again.
        data = await npm.pull()
        for n in range(10):
            data[f"npm{n}"] = n
            data, _ = await asyncio.gather(
                npm.push(data), window.run("(n) => { doc.data[`page${n}`] = n; return doc.push() }", n)
            )
        members = {f"{side}{n}": n for side in ("npm", "page") for n in range(10)}
        expected = {**both, "title": "y", **members}
        assert await window.run("doc.pull()") == await npm.pull() == expected
