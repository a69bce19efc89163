"""Every command and snippet of the tutorials and how-to pages works, in the order of the page."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urljoin

import pytest
from components import RedisServer, S3Server
from page_runner import PageRunner
from windows import Chromium, Window, driven

DOCS = Path(__file__).parents[1] / "docs"
BROWSER = "tutorial/browser.md"
SEVERAL_MACHINES = "how-to/run-on-several-machines.md"
PAGES = {
    str(path.relative_to(DOCS)) for folder in ("tutorial", "how-to") for path in (DOCS / folder).glob("*.md")
}


@pytest.mark.parametrize("page", sorted(PAGES - {BROWSER, SEVERAL_MACHINES}))
def test_page_shows_what_works(page: str, tmp_path: Path) -> None:
    with PageRunner(tmp_path / "page") as runner:
        runner.page((DOCS / page).read_text())


def test_nodes_share_a_bucket_and_a_redis_as_the_page_says(
    radosgw: S3Server, redis: RedisServer, tmp_path: Path
) -> None:
    environment = {
        "STORE_URL": f"s3://{radosgw.bucket}/several-machines",
        "S3_ENDPOINT": radosgw.endpoint,
        "REDIS_URL": redis.url,
        "AWS_ACCESS_KEY_ID": radosgw.access_key_id,
        "AWS_SECRET_ACCESS_KEY": radosgw.secret_access_key,
    }
    with PageRunner(tmp_path / "page", **environment) as runner:
        runner.page((DOCS / SEVERAL_MACHINES).read_text())


async def test_browser_tutorial_syncs_windows_and_lets_the_owner_alone_write(
    chromium: str, tmp_path: Path
) -> None:
    with PageRunner(tmp_path / "page") as runner:
        await asyncio.to_thread(runner.page, (DOCS / BROWSER).read_text())
        async with driven(chromium) as mine, driven(chromium) as theirs:
            one, other = await opened(mine, runner, "notes.html"), await opened(theirs, runner, "notes.html")
            await add(one, "milk")
            await shows(other, "milk")
            await add(other, "bread")
            await shows(one, "milk", "bread")

            board = await opened(mine, runner, "board.html")
            await add(board, "hello")
            await shows(board, "hello")
            address = await board.run("location.href")
            await board.load("about:blank")
            again = await opened(mine, runner, address)
            await add(again, "again")
            guest = await opened(theirs, runner, address)
            await shows(guest, "hello", "again")
            await add(guest, "graffiti")
            await guest.until("document.getElementById('state').textContent === 'Not saved: Forbidden'")
            assert (mine.complaints, theirs.complaints) == ([], [])


async def opened(browser: Chromium, runner: PageRunner, address: str) -> Window:
    """A window with a page of the tutorial, connected."""
    window = await browser.open(urljoin(f"{runner.url}/examples/", address))
    await window.until("document.getElementById('state').textContent === 'Live'")
    return window


async def add(window: Window, text: str) -> None:
    await window.run("document.getElementById('text').focus()")
    await window.type(text)
    await window.run("document.querySelector('button').click()")


async def shows(window: Window, *items: str) -> None:
    shown = "JSON.stringify([...document.querySelectorAll('li')].map((item) => item.textContent))"
    await window.until(f"{shown} === {json.dumps(json.dumps(items, separators=(',', ':')))}")
