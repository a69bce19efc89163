"""The notes page of deploy/examples, in windows of a real browser."""

import asyncio
import json
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from components import free_port
from components.fixtures import StartNginx
from support.browser import Chromium, Window
from support.clients import Start
from support.configurations import ROOT
from support.nginx_fixture import front
from support.s3_fault_proxy import FaultProxy
from support.server_process import serving

from pysync.auth.certificates import parse
from pysync.client import Client, IdentityKeys

EXAMPLES = ROOT / "deploy/examples"
EXAMPLE = json.loads((ROOT / "deploy/example.json").read_text())
SERVER = {"examples": str(EXAMPLES)}
MEMBERS = {"server": SERVER, "collections": EXAMPLE["collections"]}
CONNECTION = "document.getElementById('connection').textContent"
STATE = "document.getElementById('state').textContent"
PROBLEM = "document.getElementById('problem').textContent"
TEXT = "document.getElementById('text').value"
KEPT = "Saved in this browser. It is sent when the server is back."

FILL = """(async () => {
  const opening = indexedDB.open("other things")
  opening.onupgradeneeded = () => opening.result.createObjectStore("bytes", {autoIncrement: true})
  await new Promise((resolve) => { opening.onsuccess = resolve })
  for (let size = 50_000; size >= 1;) {
    const storing = opening.result.transaction("bytes", "readwrite")
    storing.objectStore("bytes").add(crypto.getRandomValues(new Uint8Array(size)))
    const isStored = await new Promise((resolve) => {
      storing.oncomplete = () => resolve(true)
      storing.onabort = () => resolve(false)
    })
    if (!isStored) size >>= 1
  }
})()"""
"""Takes the room that is left in the storage of the page."""


@dataclass
class Device:
    """Another device of the person whose notes a window shows."""

    client: Client
    owner: str

    def key(self, note: str) -> str:
        return f"notebooks/{self.owner}/{note}"

    async def write(self, note: str, **data: Any) -> None:
        """Replace a note, or create it."""
        await self.client.push(self.key(note), data, (await self.client.pull(self.key(note))).hash or None)

    async def delete(self, note: str) -> None:
        await self.client.delete(self.key(note), (await self.client.pull(self.key(note))).hash)

    async def read(self, note: str) -> dict[str, Any]:
        """The note as the server has it; `{}` for none."""
        return (await self.client.pull(self.key(note))).data


MakeDevice = Callable[[Window], Awaitable[Device]]


@pytest_asyncio.fixture
async def another_device() -> AsyncIterator[MakeDevice]:
    """Gives another device a certificate of the keys that a window has."""
    async with AsyncExitStack() as stack:

        async def make(window: Window) -> Device:
            keys = IdentityKeys.generate()
            base, text = await window.run(
                "async (edPub, kemPub) => {"
                " const base = new URL('..', location.href).href.replace(/\\/$/, '');"
                " const { IdentityKeys, issueDeviceCertificate } = await import(`${base}/client/pysync.js`);"
                " const keys = await IdentityKeys.open();"
                " return [base, JSON.stringify(await issueDeviceCertificate(keys, { edPub, kemPub }))] }",
                keys.ed_pub,
                keys.kem_pub,
            )
            client = Client(base, keys=keys, certificate=parse(text.encode()))
            return Device(await stack.enter_async_context(client), client.identity)

        yield make


async def service(start: Start, **server: Any) -> str:
    """The base URL of a service that serves the page and its notes."""
    return f"{await start({**MEMBERS, 'server': {**SERVER, **server}})}{server.get('mountPath', '')}"


async def page(screen: Chromium, base: str, note: str = "") -> Window:
    """A window with the page, which is connected, and `note` open in it."""
    window = await screen.open(f"{base}/examples/notes.html#{note}")
    await window.until(f"{CONNECTION} === 'Live'")
    return window


async def write(window: Window, text: str, *, after: str | None = None, box: str = "text") -> None:
    """Type `text` at the end of a box, or behind the words `after` in it."""
    at = f"box.value.indexOf({json.dumps(after)}) + {len(after or '')}" if after else "box.value.length"
    await window.run(
        f"(() => {{ const box = document.getElementById('{box}'); const at = {at};"
        "box.focus(); box.setSelectionRange(at, at) })()"
    )
    await window.type(text)


async def shows(window: Window, text: str) -> None:
    """Wait until the editor has just that text."""
    await window.until(f"{TEXT} === {json.dumps(text)}")


async def saved(window: Window, state: str = "Saved") -> None:
    await window.until(f"{STATE} === {json.dumps(state)}")


async def listed(window: Window, *titles: str) -> None:
    """Wait until the list beside the editor has these titles, in this order."""
    shown = "JSON.stringify([...document.querySelectorAll('#list a')].map((link) => link.textContent))"
    await window.until(f"{shown} === {json.dumps(json.dumps(titles, separators=(',', ':')))}")


async def press(window: Window, button: str) -> None:
    """Press a button that is shown."""
    await window.until(f"document.getElementById('{button}').offsetParent")
    await window.run(f"document.getElementById('{button}').click()")


# --- two windows of one browser --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mount", ["", "/v1"])
async def test_text_written_in_one_window_shows_in_the_other(
    start: Start, screen: Chromium, mount: str
) -> None:
    base = await service(start, mountPath=mount)
    one, other = await page(screen, base), await page(screen, base)
    await press(one, "new")
    await one.type("Shopping")
    await write(one, "milk\n")
    await listed(other, "Shopping")
    await other.run("document.querySelector('#list a').click()")
    await shows(other, "milk\n")
    await write(other, "bread\n")
    await shows(one, "milk\nbread\n")
    await write(other, " list", box="title")
    await listed(one, "Shopping list")
    await listed(await page(screen, base), "Shopping list")


@pytest.mark.slow
async def test_edits_of_different_lines_at_once_survive_in_both_windows(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    base = await service(start)
    one, other = await page(screen, base, "n"), await page(screen, base, "n")
    device = await another_device(one)
    await device.write("n", title="n", text="first:\nsecond:\nthird:\n")
    for window in (one, other):
        await shows(window, "first:\nsecond:\nthird:\n")
    for number in range(10):
        so_far = "".join(f" {each}" for each in range(number))
        await asyncio.gather(
            write(one, f" {number}", after=f"first:{so_far}"),
            write(other, f" {number}", after=f"third:{so_far}"),
        )
    numbers = "".join(f" {each}" for each in range(10))
    expected = f"first:{numbers}\nsecond:\nthird:{numbers}\n"
    for window in (one, other):
        await shows(window, expected)
        await saved(window)
    assert (await device.read("n"))["text"] == expected


@pytest.mark.slow
async def test_words_that_both_write_at_one_position_are_all_kept(start: Start, screen: Chromium) -> None:
    base = await service(start)
    one, other = await page(screen, base, "n"), await page(screen, base, "n")
    await write(one, "buy milk")
    for window in (one, other):
        await shows(window, "buy milk")
    await asyncio.gather(write(one, " bread"), write(other, " eggs"))
    for window in (one, other):
        await window.until(f"{TEXT}.includes('bread') && {TEXT}.includes('eggs')")
        await saved(window)
    assert await one.run(TEXT) == await other.run(TEXT)


async def test_the_caret_stays_in_its_position_while_others_write(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "n")
    device = await another_device(window)
    await device.write("n", text="one\ntwo\nthree\n")
    await shows(window, "one\ntwo\nthree\n")
    await window.run("document.getElementById('text').focus()")
    await window.run("document.getElementById('text').setSelectionRange(4, 6)")
    await device.write("n", text="zero\none\ntwo!\nthree\nfour\n")
    await shows(window, "zero\none\ntwo!\nthree\nfour\n")
    selected = "const box = document.getElementById('text')"
    selected += "; return box.value.slice(box.selectionStart, box.selectionEnd)"
    assert await window.run(f"(() => {{ {selected} }})()") == "tw"
    await window.type("TW")
    await shows(window, "zero\none\nTWo!\nthree\nfour\n")


async def test_nothing_changes_below_a_character_that_is_still_composed(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "n")
    device = await another_device(window)
    await device.write("n", text="mine:\n")
    await shows(window, "mine:\n")
    await write(window, "", after="mine:")
    await window.compose("ni")
    await device.write("n", text="theirs\nmine:\n")
    await device.write("z", title="told of later")
    await window.until("document.querySelector('#list').textContent.includes('told of later')")
    assert await window.run(TEXT) == "mine:ni\n"
    await window.type("日")
    await shows(window, "theirs\nmine:日\n")
    await saved(window)
    assert (await device.read("n"))["text"] == "theirs\nmine:日\n"


# --- without a network -----------------------------------------------------------------------------------


@pytest.mark.process
async def test_the_page_opens_without_a_server_and_sends_later_what_is_written_then(
    tmp_path: Path, screen: Chromium, another_device: MakeDevice
) -> None:
    port = free_port()
    async with serving(tmp_path, port, **MEMBERS) as process:
        window = await page(screen, process.base, "n")
        await write(window, "before\n")
        await saved(window)
        await window.run("navigator.serviceWorker.ready.then(() => true)")
    await window.until(f"{CONNECTION} === 'Offline'")
    await window.load("about:blank")
    await window.load(f"{process.base}/examples/notes.html?fresh=1#n")
    await shows(window, "before\n")
    await write(window, "meanwhile\n")
    await saved(window, KEPT)
    await window.load("about:blank")
    await window.load(f"{process.base}/examples/notes.html#n")
    await shows(window, "before\nmeanwhile\n")
    async with serving(tmp_path, port, **MEMBERS):
        await saved(window)
        device = await another_device(window)
        assert (await device.read("n"))["text"] == "before\nmeanwhile\n"


async def test_what_two_devices_write_while_one_is_offline_is_merged_word_by_word(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "n")
    device = await another_device(window)
    await device.write("n", title="Shopping", text="buy milk today\n")
    await shows(window, "buy milk today\n")
    await window.go_offline()
    await write(window, "oat ", after="buy ")
    await window.until(f"{CONNECTION} === 'Offline'")
    await saved(window, KEPT)
    await device.write("n", title="Shopping list", text="buy milk tomorrow\n")
    await window.go_offline(False)
    await shows(window, "buy oat milk tomorrow\n")
    await saved(window)
    assert await device.read("n") == {"title": "Shopping list", "text": "buy oat milk tomorrow\n"}


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_windows_say_that_the_server_is_away_and_catch_up_when_it_is_back(
    tmp_path: Path, screen: Chromium, another_device: MakeDevice, how: signal.Signals
) -> None:
    port = free_port()
    await away_and_back(tmp_path, screen, another_device, f"http://127.0.0.1:{port}", port, how)


@pytest.mark.process
async def test_behind_nginx_they_do_so_too(
    tmp_path: Path, screen: Chromium, another_device: MakeDevice, start_nginx: StartNginx
) -> None:
    """There a request is answered 503 while the server is away."""
    port = free_port()
    base = front(start_nginx, f"http://127.0.0.1:{port}")
    await away_and_back(tmp_path, screen, another_device, base, port, signal.SIGKILL)


async def away_and_back(
    folder: Path, screen: Chromium, another_device: MakeDevice, base: str, port: int, how: signal.Signals
) -> None:
    """Have two windows on `base` while the server behind it, on `port`, ends and comes back."""
    async with serving(folder, port, **MEMBERS) as process:
        windows = [await page(screen, base, "n"), await page(screen, base, "n")]
        device = await another_device(windows[0])
        await device.write("n", text="before\n")
        for window in windows:
            await shows(window, "before\n")
        process.signal(how)
        await process.ended()
    for window in windows:
        await window.until(f"{CONNECTION} === 'Offline'")
    await write(windows[0], "meanwhile\n")
    await saved(windows[0], KEPT)
    await shows(windows[1], "before\nmeanwhile\n")
    async with serving(folder, port, **MEMBERS):
        for window in windows:
            await saved(window)
            await window.until(f"{CONNECTION} === 'Live'")
        assert (await device.read("n"))["text"] == "before\nmeanwhile\n"
        await device.write("other", title="from elsewhere")
        for window in windows:
            await listed(window, "from elsewhere", "before")


@pytest.mark.slow
async def test_a_reload_shows_the_page_and_the_module_that_the_server_has_now(
    start: Start, screen: Chromium, tmp_path: Path
) -> None:
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    async with FaultProxy(await service(start, examples=str(folder))) as proxy:
        window = await page(screen, proxy.url)
        await window.run("navigator.serviceWorker.ready.then(() => true)")
        text = (folder / "notes.html").read_text()
        (folder / "notes.html").write_text(text.replace("<title>Notes<", "<title>Edited<"))
        module = (ROOT / "pysync/web/pysync.js").read_bytes() + b"\nglobalThis.isNew = true;\n"
        proxy.respond(
            "GET", status=200, body=module, headers={"Content-Type": "text/javascript"},
            when=lambda sent: sent.path == "client/pysync.js", times=None,
        )  # fmt: skip
        window = await page(screen, proxy.url)
        assert await window.run("[document.title, isNew]") == ["Edited", True]
        proxy.respond("GET", status=503, times=None, when=lambda sent: sent.path.endswith((".html", ".js")))
        await window.load("about:blank")
        await window.load(f"{proxy.url}/examples/notes.html")
        await window.until(f"{CONNECTION} === 'Live'")
        assert await window.run("[document.title, isNew]") == ["Edited", True]


@pytest.mark.slow
async def test_no_word_is_lost_or_doubled_while_connections_break(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    base = await service(start)
    async with FaultProxy(base) as proxy:
        windows = {"one:": await page(screen, proxy.url, "n"), "two:": await page(screen, proxy.url, "n")}
        device = await another_device(windows["one:"])
        await device.write("n", text="one:\n\ntwo:\n")
        for window in windows.values():
            await shows(window, "one:\n\ntwo:\n")
        proxy.chaos(random.Random(11), abort=0.2, lose_reply=0.2)

        async def write_words(line: str, window: Window) -> None:
            so_far = line
            for number in range(12):
                await write(window, f" {number}", after=so_far)
                so_far += f" {number}"
                await window.until(f"{STATE} !== 'Saving…'")

        await asyncio.gather(*(write_words(line, window) for line, window in windows.items()))
        assert proxy.met, "some failed"
        proxy.reset()
        words = "".join(f" {number}" for number in range(12))
        for window in windows.values():
            await shows(window, f"one:{words}\n\ntwo:{words}\n")
            await saved(window)
        assert (await device.read("n"))["text"] == f"one:{words}\n\ntwo:{words}\n"


# --- problems --------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_note_that_is_rejected_says_why_and_is_saved_when_it_fits(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    base = await service(start)
    window = await page(screen, base, "n")
    device = await another_device(window)
    await device.write("n", text="fits, ")
    await shows(window, "fits, ")
    await write(window, "x" * 70_000)
    await saved(window, "Not saved: Payload too large")
    await shows(window, "fits, " + "x" * 70_000)
    elsewhere = await page(screen, base)
    await elsewhere.until(f"{PROBLEM}.endsWith('”: Not saved: Payload too large')")
    await window.run("document.getElementById('text').select()")
    await window.type("short")
    await saved(window)
    assert await device.read("n") == {"title": "", "text": "short"}
    await elsewhere.until(f"{PROBLEM} === ''")


@pytest.mark.slow
async def test_rejected_text_is_there_after_a_reload(start: Start, screen: Chromium) -> None:
    base = await service(start)
    window = await page(screen, base, "n")
    await write(window, "x" * 70_000)
    await saved(window, "Not saved: Payload too large")
    await window.load("about:blank")
    again = await page(screen, base)
    await listed(again, "x" * 70_000)
    await again.run("document.querySelector('#list a').click()")
    await shows(again, "x" * 70_000)
    await saved(again, "Not saved: Payload too large")


async def test_text_that_finds_no_room_on_the_disk_stays_and_is_saved_when_there_is_room(
    start: Start, screen: Chromium
) -> None:
    base = await service(start)
    await (await screen.open(f"{base}/examples/index.html")).limit_storage(3_000_000)
    window = await page(screen, base, "n")
    await write(window, "kept")
    await saved(window)
    await window.run(FILL)
    await write(window, " here" * 1000)
    await window.until(f"{STATE}.startsWith('Not saved: ')")
    await shows(window, "kept" + " here" * 1000)
    await window.limit_storage(None)
    await write(window, ", too")
    await saved(window)


async def test_a_browser_without_ed25519_is_told_so(start: Start, screen: Chromium) -> None:
    without = "crypto.subtle.generateKey = async () => { throw new DOMException('', 'NotSupportedError') }"
    window = await screen.open(f"{await service(start)}/examples/notes.html", without)
    await window.until(f"{PROBLEM}.includes('older than Chrome')")


async def test_notes_are_shown_as_text_and_keep_unknown_members(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "c")
    device = await another_device(window)
    await device.write("c", title="<img src=x onerror=alert(1)>", text="", colour="red")
    await device.write("b", title=7, text=["no text"])
    await device.write("a", text="\r\n one\r\ntwo")
    await listed(window, "<img src=x onerror=alert(1)>", "Untitled", "one")
    await write(window, "more")
    await saved(window)
    assert (await device.read("c"))["colour"] == "red"
    assert (await device.read("b"))["title"] == 7, "nobody wrote there"


# --- deleting, history, search ---------------------------------------------------------------------------


async def test_a_note_deleted_in_one_window_is_gone_in_both_and_comes_back_by_undo(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    base = await service(start)
    one, other = await page(screen, base, "n"), await page(screen, base, "n")
    device = await another_device(one)
    await device.write("n", title="Shopping", text="milk", colour="red")
    for window in (one, other):
        await listed(window, "Shopping")
        await shows(window, "milk")
    await press(one, "delete")
    for window in (one, other):
        await listed(window)
        await window.until("document.getElementById('hint').textContent === '“Shopping” is deleted.'")
    await press(other, "undo")
    for window in (one, other):
        await listed(window, "Shopping")
    await shows(other, "milk")
    await saved(other)
    assert await device.read("n") == {"title": "Shopping", "text": "milk", "colour": "red"}


async def test_a_note_in_which_nothing_is_written_is_not_made(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start))
    device = await another_device(window)
    await press(window, "new")
    await press(window, "delete")
    await press(window, "new")
    await device.write("n", title="the only one")
    await listed(window, "the only one")
    assert [each async for each in device.client.list(f"notebooks/{device.owner}")] == ["n"]


async def test_a_delete_spares_what_somebody_wrote_meanwhile(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "n")
    device = await another_device(window)
    await device.write("n", text="seen")
    await shows(window, "seen")
    await window.go_offline()
    await press(window, "delete")
    await listed(window)
    await device.write("n", text="seen, and more")
    await window.go_offline(False)
    await listed(window, "seen, and more")
    assert (await device.read("n"))["text"] == "seen, and more"


async def test_a_note_that_another_deletes_stays_with_what_is_written_in_it(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "n")
    device = await another_device(window)
    await device.write("n", text="one")
    await shows(window, "one")
    await write(window, "")
    await window.compose(", two")
    await device.delete("n")
    await device.write("z", title="told of later")
    await listed(window, "told of later")
    await window.type(", two")
    await listed(window, "told of later", "one, two")
    await saved(window)
    assert (await device.read("n"))["text"] == "one, two"


async def test_an_earlier_version_is_shown_and_restored(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "n")
    device = await another_device(window)
    await device.write("n", title="n", text="at noon")
    await device.write("n", title="n", text="in the evening")
    await shows(window, "in the evening")
    await press(window, "past")
    version = "document.getElementById('version').textContent"
    await window.until(f"{version} === 'n\\n\\nin the evening'")
    await device.write("n", title="n", text="at night")
    await window.until(f"{version} === 'n\\n\\nat night'")
    await window.until("document.getElementById('versions').length === 3")
    await window.run("document.getElementById('versions').selectedIndex = 2")
    await window.run("document.getElementById('versions').dispatchEvent(new Event('change'))")
    await window.until(f"{version} === 'n\\n\\nat noon'")
    await press(window, "restore")
    await shows(window, "at noon")
    await saved(window)
    assert (await device.read("n"))["text"] == "at noon"


async def test_history_without_a_network_says_what_is_missing(start: Start, screen: Chromium) -> None:
    window = await page(screen, await service(start), "n")
    await write(window, "one")
    await saved(window)
    await window.go_offline()
    await press(window, "past")
    await window.until(
        "document.getElementById('version').textContent === 'The server has the history: try again later.'"
    )


async def test_a_search_leaves_the_notes_with_all_its_words(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start))
    device = await another_device(window)
    await device.write("a", title="Shopping", text="Milk and bread")
    await device.write("b", title="Milk", text="")
    await listed(window, "Milk", "Shopping")
    found = "[...document.querySelectorAll('#list a')].filter((link) => link.offsetParent).length"
    await write(window, "BREAD milk", box="search")
    assert await window.run(found) == 1
    await device.write("c", title="white bread", text="no")
    await listed(window, "white bread", "Milk", "Shopping")
    assert await window.run(found) == 1
    await window.run("document.getElementById('search').select()")
    await window.type("bread")
    assert await window.run(found) == 2


@pytest.mark.slow
async def test_more_notes_than_a_page_of_a_list_are_all_there(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start))
    device = await another_device(window)
    names = [f"{number:03}" for number in range(205)]
    await asyncio.gather(*(device.write(name, title=name) for name in names))
    await listed(window, *reversed(names))


# --- links -----------------------------------------------------------------------------------------------


async def link_to(window: Window) -> str:
    """The link that the window makes of the note that is open in it."""
    await press(window, "share")
    await window.until("document.getElementById('given').textContent")
    link: str = await window.run("document.getElementById('link').value")
    return link


async def expired_link_to(window: Window, note: str) -> str:
    link: str = await window.run(
        "async (note) => {"
        " const { IdentityKeys, issueAudienceCertificate, publicLink } = await import('/client/pysync.js');"
        " const keys = await IdentityKeys.open(), paths = [`notebooks/${keys.userId}/${note}`];"
        " const grant = { ops: ['read'], paths }, dates = { nowS: 1_000_000_000, expiresAtS: 1_000_000_600 };"
        " const expired = await issueAudienceCertificate(keys, 'notebooks', { grant, ...dates });"
        " return new URL(`#share=${publicLink(expired)}`, location.href).href }",
        note,
    )
    return link


@pytest.mark.slow
async def test_a_link_shows_one_note_in_another_browser_where_it_is_edited_live(
    start: Start, screen: Chromium, other_screen: Chromium, another_device: MakeDevice
) -> None:
    mine = await page(screen, await service(start), "n")
    device = await another_device(mine)
    await device.write("n", title="Shopping", text="milk\n")
    await device.write("z", title="Diary", text="private")
    await listed(mine, "Diary", "Shopping")
    link = await link_to(mine)
    assert "?" not in link
    assert "this note" in await mine.run("document.getElementById('given').textContent")
    theirs = await other_screen.open(link)
    await shows(theirs, "milk\n")
    await theirs.until(f"{CONNECTION} === 'Live'")
    await write(theirs, "bread\n")
    await shows(mine, "milk\nbread\n")
    await write(mine, "butter\n")
    await shows(theirs, "milk\nbread\nbutter\n")
    await saved(theirs)
    assert "Diary" not in await theirs.run("document.documentElement.outerHTML")
    for width in (1280, 360):
        await theirs.show_as(width, 640)
        assert await theirs.run("document.documentElement.scrollWidth <= innerWidth")
        assert set(await theirs.controls()) == {
            ("button", "Delete"),
            *(("textbox", name) for name in ("Title", "Text")),
            ("link", "My own notes"),
        }


@pytest.mark.process
async def test_a_note_of_a_link_is_read_and_edited_without_a_network(
    tmp_path: Path, screen: Chromium, other_screen: Chromium
) -> None:
    port = free_port()
    async with serving(tmp_path, port, **MEMBERS) as process:
        mine = await page(screen, process.base, "n")
        await write(mine, "milk\n")
        await saved(mine)
        link = await link_to(mine)
        theirs = await other_screen.open(link)
        await shows(theirs, "milk\n")
        await theirs.run("navigator.serviceWorker.ready.then(() => true)")
    await theirs.load("about:blank")
    await theirs.load(link)
    await shows(theirs, "milk\n")
    await write(theirs, "bread\n")
    await saved(theirs, KEPT)
    async with serving(tmp_path, port, **MEMBERS):
        await shows(mine, "milk\nbread\n")
        await saved(theirs)


async def test_a_note_of_a_link_that_is_deleted_is_restored_by_either_side(
    start: Start, screen: Chromium, other_screen: Chromium
) -> None:
    mine = await page(screen, await service(start), "n")
    await write(mine, "milk")
    await saved(mine)
    theirs = await other_screen.open(await link_to(mine))
    await shows(theirs, "milk")
    await press(theirs, "delete")
    await listed(mine)
    await press(theirs, "undo")
    await listed(mine, "milk")
    await shows(theirs, "milk")


async def test_a_link_that_has_expired_says_so(
    start: Start, screen: Chromium, other_screen: Chromium
) -> None:
    mine = await page(screen, await service(start), "n")
    await write(mine, "milk")
    await saved(mine)
    link = await expired_link_to(mine, "n")
    theirs = await other_screen.open(link)
    await theirs.until(f"{PROBLEM}.startsWith('This link has expired')")


async def test_a_link_for_another_server_says_so(
    start: Start, screen: Chromium, other_screen: Chromium
) -> None:
    mine = await page(screen, await service(start), "n")
    await write(mine, "milk")
    await saved(mine)
    _, fragment = (await link_to(mine)).split("#")
    theirs = await other_screen.open(f"{await service(start)}/examples/notes.html#{fragment}")
    await theirs.until(f"{PROBLEM} === 'This note is deleted, or the link is for another server.'")


async def test_a_link_that_is_cut_says_so(start: Start, screen: Chromium) -> None:
    window = await page(screen, await service(start), "n")
    link = await link_to(window)
    await window.load("about:blank")
    await window.load(link[:-40])
    await window.until(f"{PROBLEM}.startsWith('This link is incomplete')")


# --- on a phone ------------------------------------------------------------------------------------------


async def test_a_phone_shows_the_list_or_a_note(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start))
    await (await another_device(window)).write("n", title="Shopping", text="milk")
    await window.show_as(360, 640)
    await listed(window, "Shopping")
    listing, writing = (
        f"document.getElementById('{each}').offsetParent !== null" for each in ("list", "text")
    )
    assert [await window.run(listing), await window.run(writing)] == [True, False]
    await window.run("document.querySelector('#list a').click()")
    await window.until(writing)
    assert not await window.run(listing)
    await press(window, "fold")
    assert [await window.run(listing), await window.run(writing)] == [True, False]
    await window.run("document.querySelector('#list a').click()")
    assert [await window.run(listing), await window.run(writing)] == [False, True]


@pytest.mark.parametrize("width", [360, 1280])
async def test_controls_are_44_pixels_high_and_fit_the_screen(
    start: Start, screen: Chromium, another_device: MakeDevice, width: int
) -> None:
    window = await page(screen, await service(start), "n")
    device = await another_device(window)
    await window.show_as(width, 640)
    await device.write("n", title="Shopping", text="milk")
    await device.write("n", title="Shopping" * 20, text="milk " * 100)
    small = (
        "[...document.querySelectorAll('a, button, select, input, textarea')].filter((each) =>"
        " each.offsetParent && each.getBoundingClientRect().height < 44)"
        ".map((each) => each.id || each.textContent)"
    )
    spills = "document.documentElement.scrollWidth > innerWidth || document.body.scrollHeight > innerHeight"
    await shows(window, "milk " * 100)
    buttons = ("past", "past", "share", "share", *(("fold",) if width < 500 else ()), "delete")
    for button in buttons:
        assert await window.run(small) == []
        assert not await window.run(spills)
        if button != "delete":
            await press(window, button)
        if button == "past":
            await window.until("document.getElementById('versions').length === 2")
        if button == "share":
            await window.until("document.getElementById('given').textContent")


async def test_everything_that_can_be_used_has_a_name(
    start: Start, screen: Chromium, another_device: MakeDevice
) -> None:
    window = await page(screen, await service(start), "n")
    await (await another_device(window)).write("n", title="Shopping")
    await listed(window, "Shopping")
    await link_to(window)
    assert set(await window.controls()) == {
        *(("button", name) for name in ("New note", "Share", "History", "Delete")),
        *(("textbox", name) for name in ("Title", "Text", "Link to this note")),
        ("searchbox", "Search"),
        ("link", "Shopping"),
    }


async def test_the_page_works_from_any_web_server(start: Start, screen: Chromium) -> None:
    elsewhere = web.Application()
    elsewhere.router.add_static("/pages", EXAMPLES)
    elsewhere.router.add_static("/client", ROOT / "pysync/web")
    async with TestServer(elsewhere) as server:
        origin = str(server.make_url("")).rstrip("/")
        base = await service(start, cors={"origins": [origin]})
        window = await screen.open(f"{origin}/pages/notes.html?server={base}#n")
        await window.until(f"{CONNECTION} === 'Live'")
        await write(window, "from elsewhere")
        await saved(window)
        assert f"?server={base}" in await link_to(window)


# --- merging ---------------------------------------------------------------------------------------------


async def merged(screen: Chromium, base: str, cases: list[tuple[str, str, str]]) -> list[str]:
    """What the page makes of each base, mine and theirs."""
    window = await screen.open(f"{base}/examples/index.html")
    found: list[str] = await window.run(
        "async (cases) => { const { mergeText } = await import('/examples/merge-text.js');"
        " return cases.map((texts) => mergeText(...texts)) }",
        cases,
    )
    return found


async def test_a_merge_has_what_either_side_changed(start: Start, screen: Chromium) -> None:
    cases = [
        (("a\nb\nc\n", "A\nb\nc\n", "a\nb\nC\n"), "A\nb\nC\n"),
        (("a\nb\nc\n", "a\nb\nc\nmine\n", "theirs\na\nb\nc\n"), "theirs\na\nb\nc\nmine\n"),
        (("a\nb\nc\n", "a\nc\n", "a\nb\nc\nd\n"), "a\nc\nd\n"),
        (("buy milk today\n", "buy oat milk today\n", "buy milk tomorrow\n"), "buy oat milk tomorrow\n"),
        (("a", "a\nmine", "a\ntheirs"), "a\ntheirs\nmine"),
        (("", "mine", "theirs"), "theirsmine"),
        (("a\nb\n", "a\n", "a\nb, changed\n"), "a\nb, changed\n"),
        (("a\nb\n", "a!\nb\n", "new\na\nb\n"), "new\na!\nb\n"),
        (("a\nb\n", "a!\nb\n", "a\nb!\n"), "a!\nb!\n"),
        (("a\n", "a\nsame\n", "a\nsame\n"), "a\nsame\n"),
        (("a", "a and then more", "a and then"), "a and then more"),
        (("ü 🙂\n", "ü 🙂!\n", "über ü 🙂\n"), "über ü 🙂!\n"),
    ]
    found = await merged(screen, await service(start), [case for case, _ in cases])
    assert found == [expected for _, expected in cases]


async def test_a_merge_loses_no_line_that_somebody_wrote(start: Start, screen: Chromium) -> None:
    rng = random.Random(6)
    cases = []
    for _ in range(400):
        base = [f"{rng.choice('abcd')}\n" for _ in range(rng.randrange(12))]
        cases.append((base, edited(base, "mine", rng), edited(base, "theirs", rng)))
    found = await merged(
        screen, await service(start), [("".join(b), "".join(m), "".join(t)) for b, m, t in cases]
    )
    for (base, mine, theirs), text in zip(cases, found, strict=True):
        for line in mine + theirs:
            assert line in base or line.strip() in text, (base, mine, theirs, text)


async def test_a_merge_with_a_side_that_changed_nothing_is_the_other(start: Start, screen: Chromium) -> None:
    rng = random.Random(7)
    base = [f"{rng.choice('abcd')}\n" for _ in range(200)]
    sides = ["".join(edited(base, "x", rng)) for _ in range(20)]
    whole = "".join(base)
    address = await service(start)
    assert await merged(screen, address, [(whole, side, whole) for side in sides]) == sides
    assert await merged(screen, address, [(whole, whole, side) for side in sides]) == sides


async def test_long_texts_are_merged_in_a_moment(start: Start, screen: Chromium) -> None:
    base = "".join(f"{number}\n" for number in range(12_000))
    mine, theirs = base.replace("7", "seven"), base.replace("3", "three")
    (text,) = await merged(screen, await service(start), [(base, mine, theirs)])
    assert {*mine.split(), *theirs.split()} - {*base.split()} <= {*text.split()}


def edited(lines: list[str], text_mark: str, rng: random.Random) -> list[str]:
    """The lines with some left out, and others that bear the mark put in."""
    made: list[str] = []
    for number, line in enumerate([*lines, ""]):
        if rng.random() < 0.2:
            made.append(f"{text_mark}{number}\n")
        if rng.random() < 0.8:
            made.append(line)
    return [line for line in made if line]
