"""The browser tutorial, followed word for word: its files and commands, and its pages in two browsers."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.browser import Chromium, Window
from support.page_runner import PageRunner, blocks_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

PAGE = Path(__file__).parents[2] / "docs/tutorial/browser.md"
SERVE = "pysync serve"


COUNT_VERIFIED = """
window.verified = 0
const verify = SubtleCrypto.prototype.verify
SubtleCrypto.prototype.verify = function (...values) {
  return verify.apply(this, values).finally(() => { verified += 1 })
}"""
OFFER_FORGED = """async (key) => {
  const pysync = await import("/client/pysync.js"), stranger = await pysync.IdentityKeys.generate()
  const client = new pysync.Client("/"), {data, hash} = await client.pull(key)
  const issued = await pysync.issueDeviceCertificate(stranger, data)
  await client.push(key, {...data, certificate: {...issued, exp: issued.exp + 1}}, hash)
}"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator["Reader"]:
    with PageRunner(tmp_path / "page") as runner:
        yield Reader(runner)


class Reader:
    """Does what the sections of the tutorial say. Stops the server itself, where the reader is told to."""

    def __init__(self, runner: PageRunner) -> None:
        self.runner = runner
        self.url = f"{runner.url}/examples/"
        self._sections = re.split(r"^(?=## )", PAGE.read_text(), flags=re.M)

    async def follow(self, heading: str, *, first: int = 0, last: int | None = None) -> None:
        """Do what the blocks of a section say, without stopping the server before."""
        (section,) = (text for text in self._sections if text.startswith(f"## {heading}"))
        for block in blocks_of(section)[first:last]:
            directive = "" if block.value("stop") else block.directive
            await asyncio.to_thread(self.runner.block, replace(block, directive=directive))

    async def stop_server(self) -> None:
        await asyncio.to_thread(self.runner.stop, SERVE)


async def test_two_devices_edit_one_list_offline_and_agree_afterwards(
    screen: Chromium, other_screen: Chromium, reader: Reader
) -> None:
    await reader.follow("Start a server")
    one, other = await screen.open(reader.url), await screen.open(reader.url)
    await add(one, "milk")
    await shows(other, "[ ] milk")
    await add(other, "flour")
    await shows(one, "[ ] milk", "[ ] flour")

    await reader.stop_server()
    await add(one, "bread")
    await tick(other, "milk")
    for window in (one, other):
        await shows(window, "[x] milk", "[ ] flour", "[ ] bread")
        await says(window, "Offline, with unsent edits")
        await window.close()
    await reader.follow("Edit without")
    first = await screen.open(reader.url)
    await says(first, "Online")
    await shows(first, "[x] milk", "[ ] flour", "[ ] bread")

    await reader.stop_server()
    await reader.follow("Open the page", last=2)
    await first.load(reader.url)
    await first.run("navigator.serviceWorker.ready.then(() => true)")
    await reader.stop_server()
    await first.load(reader.url)
    await shows(first, "[x] milk", "[ ] flour", "[ ] bread")
    await add(first, "eggs")
    await reader.follow("Open the page", first=2)

    await reader.follow("Pair", last=2)
    second = await other_screen.open(reader.url.replace("127.0.0.1", "localhost"))
    await second.until("document.getElementById('join') !== null")
    await shows(second)
    await second.run("document.getElementById('join').click()")
    await second.until("document.getElementById('code').textContent.length === 12")
    code = await second.run("document.getElementById('code').textContent")
    await first.load(reader.url)
    await write(first, "typed", code, "admit")
    for _ in range(2):
        with suppress(RuntimeError):  # the page loads itself again
            await second.until("document.getElementById('admit')?.hidden")
    listed = ["[x] milk", "[ ] flour", "[ ] bread", "[ ] eggs"]
    await shows(second, *listed)
    await second.load(await second.run("location.href"))
    await second.run("navigator.serviceWorker.ready.then(() => true)")

    await reader.stop_server()
    await add(first, "apples")
    await tick(second, "bread")
    await shows(first, *listed, "[ ] apples")
    await shows(second, "[x] milk", "[ ] flour", "[x] bread", "[ ] eggs")
    for window in (first, second):
        await says(window, "Offline, with unsent edits")
    await reader.follow("Pair", first=2)
    for window in (first, second):
        await shows(window, "[x] milk", "[ ] flour", "[x] bread", "[ ] eggs", "[ ] apples")


async def test_code_of_other_keys_lets_no_device_in(screen: Chromium, reader: Reader) -> None:
    await reader.follow("Start a server")
    await reader.follow("Pair", last=2)
    first = await screen.open(reader.url)
    await first.run("window.alert = (text) => { window.said = text; }")
    offer = json.dumps({"edPub": "0" * 64, "kemPub": "0" * 64})
    reader.runner.run(f"echo '{offer}' | pysync push pairing/000000000000")
    await write(first, "typed", "000000000000", "admit")
    await first.until("window.said === 'No device shows this code.'")
    assert json.loads(reader.runner.run("pysync pull pairing/000000000000 --data")) == json.loads(offer)


async def test_second_device_takes_no_certificate_that_its_issuer_has_not_signed(
    screen: Chromium, other_screen: Chromium, reader: Reader
) -> None:
    await reader.follow("Start a server")
    await reader.follow("Pair", last=2)
    first = await screen.open(reader.url)
    second = await other_screen.open(reader.url, COUNT_VERIFIED)
    await second.until("document.getElementById('join') !== null")
    await second.run("document.getElementById('join').click()")
    await second.until("document.getElementById('code').textContent.length === 12")
    code = await second.run("document.getElementById('code').textContent")
    await first.run(f"({OFFER_FORGED})('pairing/{code}')")
    await second.until("window.verified === 1")
    await write(first, "typed", code, "admit")
    shown = "document.getElementById('user')?.textContent"
    user = await first.run(shown)
    with suppress(RuntimeError):  # the page loads itself again
        await second.until(f"{shown} === '{user}'")
    await second.until(f"{shown} === '{user}'")


async def write(window: Window, field: str, text: str, form: str) -> None:
    """Type into a field, and press the button of its form."""
    await window.until(f"document.getElementById('{field}') !== null")
    await window.run(f"document.getElementById('{field}').focus()")
    await window.type(text)
    await window.run(f"document.querySelector('#{form} button').click()")


async def add(window: Window, text: str) -> None:
    await write(window, "text", text, "form")


async def tick(window: Window, text: str) -> None:
    labels = "[...document.querySelectorAll('li label')]"
    await window.run(f"{labels}.find((each) => each.textContent.trim() === {json.dumps(text)}).click()")


async def shows(window: Window, *items: str) -> None:
    """Return when the list has these items."""
    item = "(each) => `[${each.querySelector('input').checked ? 'x' : ' '}]${each.textContent}`"
    shown = f"JSON.stringify([...document.querySelectorAll('li')].map({item}))"
    await window.until(f"{shown} === {json.dumps(json.dumps(items, separators=(',', ':')))}")


async def says(window: Window, state: str) -> None:
    await window.until(f"document.getElementById('state').textContent === '{state}'")
