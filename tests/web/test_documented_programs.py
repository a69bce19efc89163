"""The programs for browsers that the documentation shows do what their pages say."""

import json
from pathlib import Path

from support.browser import Chromium, Window
from support.clients import Start
from support.page_runner import blocks_of

DOCS = Path(__file__).parents[2] / "docs"
PAGE = """<!doctype html>
<meta charset="utf-8">
<script type="module">
import { Client, IdentityKeys } from "/client/pysync.js";
window.client = new Client("/", { keys: await IdentityKeys.open() });
window.pulled = async (key, options) => {
  for (;;) {
    const { data, hash } = await client.pull(key, options);
    if (hash) return data;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
};
</script>
<script type="module" src="PROGRAM"></script>
"""


async def running(start: Start, screen: Chromium, folder: Path, page: str, program: str) -> Window:
    """A window that runs a program of a page, on a server with the configuration of the page. `pulled(key)`
    waits until something is stored there, and is its data."""
    shown = {block.title: block.text for block in blocks_of((DOCS / page).read_text())}
    (folder / program).write_text(shown[program])
    (folder / "page.html").write_text(PAGE.replace("PROGRAM", program))
    settings = json.loads(shown["pysync.json"]) | {"store": "memory:", "server": {"examples": str(folder)}}
    window = await screen.open(f"{await start(settings)}/examples/page.html")
    await window.until("window.pulled")
    return window


async def test_replica_of_the_page_on_offline_work_sends_its_edits(
    start: Start, screen: Chromium, tmp_path: Path
) -> None:
    window = await running(start, screen, tmp_path, "how-to/work-offline.md", "app.js")
    home = f"users/{await window.run('client.identity')}"
    packing = {"items": [{"id": "tent"}, {"id": "stove"}]}
    assert await window.run("(key) => pulled(key)", f"{home}/notes/packing") == packing
    log = await window.run("(key) => pulled(key, { last: 1 })", f"{home}/journal/monday")
    assert [element["data"] for element in log["items"]] == [{"text": "rain all day"}]


async def test_document_of_the_page_on_sealing_is_sealed_on_the_server(
    start: Start, screen: Chromium, tmp_path: Path
) -> None:
    window = await running(start, screen, tmp_path, "how-to/seal-data.md", "plan.js")
    assert sorted(await window.run("pulled('teams/t2/plans/p1')")) == ["_encrypted", "_epoch"]
