"""Pages of other origins load the browser client by its version and its hash, as the reference shows it."""

import re

from aiohttp import web
from aiohttp.test_utils import TestServer
from support.browser import driven
from support.clients import Start
from support.configurations import ROOT

SHOWN = "https://sync.example.org"
IMPORTED = 'import { Client } from "pysync";'
IMPORTING = """
  const show = (title) => { document.title = title }
  import("pysync").then((loaded) => show(typeof loaded.Client), () => show("none"))
"""


async def test_page_of_another_origin_runs_the_module_with_that_hash_and_no_other(
    start: Start, chromium: str
) -> None:
    reference = (ROOT / "docs/reference/browser-client.md").read_text()
    snippet = re.search(r"<!-- integrity -->\n```html\n(.*)```\n<!-- /integrity -->", reference, re.S)
    assert snippet is not None
    assert IMPORTED in snippet[1]
    page = snippet[1].replace(SHOWN, await start({})).replace(IMPORTED, IMPORTING)
    pages = {"/named": page, "/changed": re.sub("sha384-.{8}", "sha384-AAAAAAAA", page)}

    async def serve(request: web.Request) -> web.Response:
        return web.Response(text=pages[request.path], content_type="text/html")

    application = web.Application()
    application.router.add_get("/{page}", serve)
    async with TestServer(application) as other, driven(chromium) as browser:
        for path, title in (("/named", "function"), ("/changed", "none")):
            window = await browser.open(str(other.make_url(path)))
            await window.until("document.title !== ''")
            assert await window.run("document.title") == title
