"""The notes page of deploy/examples, in two windows of a real browser."""

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from components import free_port
from components.fixtures import StartNginx
from support.browser import Chromium, Window
from support.clients import Browser, Start
from support.configurations import ROOT
from support.nginx_fixture import front
from support.s3_fault_proxy import FaultProxy
from support.server_process import serving

EXAMPLES = ROOT / "deploy/examples"
EXAMPLE = json.loads((ROOT / "deploy/example.json").read_text())
SERVER = {"examples": str(EXAMPLES)}
CONNECTION = "document.getElementById('connection').textContent"
STATE = "document.getElementById('state').textContent"
AWAY = f"{CONNECTION} === 'Offline'"
TEXT = "document.getElementById('text').value"


async def service(start: Start, **server: Any) -> str:
    """The base URL of a service that serves the page and its notes."""
    members = {"server": {**SERVER, **server}, "collections": EXAMPLE["collections"]}
    return f"{await start(members)}{server.get('mountPath', '')}"


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


async def saved(window: Window) -> None:
    await window.until(f"{STATE} === 'Saved'")


async def listed(window: Window, *titles: str) -> None:
    """Wait until the list beside the editor has these titles, in this order."""
    shown = "JSON.stringify([...document.querySelectorAll('#list a')].map((link) => link.textContent))"
    await window.until(f"{shown} === {json.dumps(json.dumps(titles, separators=(',', ':')))}")


@pytest.mark.slow
@pytest.mark.parametrize("mount", ["", "/v1"])
async def test_text_written_in_one_window_shows_in_the_other(
    start: Start, screen: Chromium, mount: str
) -> None:
    base = await service(start, mountPath=mount)
    one, other = await page(screen, base), await page(screen, base)
    await one.run("document.getElementById('new').click()")
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


async def test_edits_of_different_lines_at_once_survive_in_both_windows(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    await browser.push("notes/n", {"title": "n", "text": "first:\nsecond:\nthird:\n"})
    one, other = await page(screen, base, "n"), await page(screen, base, "n")
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
    assert (await browser.pull("notes/n")).json["data"]["text"] == expected


async def test_words_that_both_write_at_one_position_are_all_kept(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    await Browser(base, session).push("notes/n", {"text": "buy milk"})
    one, other = await page(screen, base, "n"), await page(screen, base, "n")
    for window in (one, other):
        await shows(window, "buy milk")
    await asyncio.gather(write(one, " bread"), write(other, " eggs"))
    for window in (one, other):
        await window.until(f"{TEXT}.includes('bread') && {TEXT}.includes('eggs')")
        await saved(window)
    assert await one.run(TEXT) == await other.run(TEXT)


async def test_the_caret_stays_in_its_position_while_others_write(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    first = (await browser.push("notes/n", {"text": "one\ntwo\nthree\n"})).json["hash"]
    window = await page(screen, base, "n")
    await shows(window, "one\ntwo\nthree\n")
    await window.run("document.getElementById('text').focus()")
    await window.run("document.getElementById('text').setSelectionRange(4, 6)")
    await browser.push("notes/n", {"text": "zero\none\ntwo!\nthree\nfour\n"}, first)
    await shows(window, "zero\none\ntwo!\nthree\nfour\n")
    selected = (
        "const box = document.getElementById('text');box.value.slice(box.selectionStart, box.selectionEnd)"
    )
    assert await window.run(f"(() => {{ {selected.replace(';box', ';return box')} }})()") == "tw"
    await window.type("TW")
    await shows(window, "zero\none\nTWo!\nthree\nfour\n")


async def test_nothing_changes_below_a_character_that_is_still_composed(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    first = (await browser.push("notes/n", {"text": "mine:\n"})).json["hash"]
    window = await page(screen, base, "n")
    await shows(window, "mine:\n")
    await write(window, "", after="mine:")
    await window.compose("ni")
    await browser.push("notes/n", {"text": "theirs\nmine:\n"}, first)
    await browser.push("notes/z", {"title": "told of later"})
    await window.until("document.querySelector('#list').textContent.includes('told of later')")
    assert await window.run(TEXT) == "mine:ni\n"
    await window.type("日")
    await shows(window, "theirs\nmine:日\n")
    await saved(window)


async def test_a_push_whose_answer_is_lost_is_made_once(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    async with FaultProxy(base) as proxy:
        window = await page(screen, proxy.url, "n")
        proxy.lose_reply("POST")
        await write(window, "once")
        await saved(window)
        await shows(window, "once")
        assert proxy.met["lose_reply"] == 1
    assert (await Browser(base, session).pull("notes/n")).json["data"]["text"] == "once"


@pytest.mark.slow
async def test_a_change_costs_a_push_in_one_window_and_a_pull_in_the_other(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    async with FaultProxy(base) as proxy:
        one, other = await page(screen, proxy.url, "n"), await page(screen, proxy.url, "n")
        await write(one, "first")
        for window in (one, other):
            await shows(window, "first")
            await saved(window)
        proxy.reset_counts()
        await write(one, ", second")
        await shows(other, "first, second")
        await Browser(base, session).push("notes/z", {"title": "told of after it"})
        for window in (one, other):
            await listed(window, "told of after it", "first, second")
            await saved(window)
        assert proxy.calls == {"POST": 1, "GET": 3}, "and each has pulled what came after it"


@pytest.mark.slow
async def test_no_word_is_lost_or_doubled_while_connections_break(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    await browser.push("notes/n", {"text": "one:\n\ntwo:\n"})
    async with FaultProxy(base) as proxy:
        windows = {"one:": await page(screen, proxy.url, "n"), "two:": await page(screen, proxy.url, "n")}
        for window in windows.values():
            await shows(window, "one:\n\ntwo:\n")
        proxy.chaos(random.Random(11), abort=0.2, lose_reply=0.2)

        async def write_words(line: str, window: Window) -> None:
            so_far = line
            for number in range(12):
                await write(window, f" {number}", after=so_far)
                so_far += f" {number}"
                await window.until(f"!document.querySelector('[aria-current]').matches('.unsaved') || {AWAY}")

        await asyncio.gather(*(write_words(line, window) for line, window in windows.items()))
        assert proxy.met, "some failed"
        proxy.reset()
        words = "".join(f" {number}" for number in range(12))
        for window in windows.values():
            await shows(window, f"one:{words}\n\ntwo:{words}\n")
            await saved(window)


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_windows_say_that_the_server_is_away_and_catch_up_when_it_is_back(
    tmp_path: Path, screen: Chromium, session: aiohttp.ClientSession, how: signal.Signals
) -> None:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    await away_and_back(tmp_path, screen, session, base, port, how)


@pytest.mark.process
async def test_behind_nginx_they_do_so_too(
    tmp_path: Path, screen: Chromium, session: aiohttp.ClientSession, start_nginx: StartNginx
) -> None:
    """There a browser gives up on a stream: while the server is away it is answered 503."""
    port = free_port()
    base = front(start_nginx, f"http://127.0.0.1:{port}")
    await away_and_back(tmp_path, screen, session, base, port, signal.SIGKILL)


async def away_and_back(
    folder: Path,
    screen: Chromium,
    session: aiohttp.ClientSession,
    base: str,
    port: int,
    how: signal.Signals,
) -> None:
    """Have two windows on `base` while the server behind it, on `port`, ends and comes back."""
    members = {"server": SERVER, "collections": EXAMPLE["collections"]}
    browser = Browser(base, session)
    async with serving(folder, port, **members) as process:
        await browser.push("notes/n", {"text": "before\n"})
        windows = [await page(screen, base, "n"), await page(screen, base, "n")]
        for window in windows:
            await shows(window, "before\n")
        process.signal(how)
        await process.ended()
    for window in windows:
        await window.until(f"{CONNECTION} === 'Offline'")
    await write(windows[0], "meanwhile\n")
    await windows[0].until(f"{STATE}.startsWith('Not saved yet')")
    async with serving(folder, port, **members):
        for window in windows:
            await shows(window, "before\nmeanwhile\n")
            await saved(window)
            await window.until(f"{CONNECTION} === 'Live'")
        await browser.push("notes/other", {"title": "from elsewhere"})
        for window in windows:
            await listed(window, "from elsewhere", "before")


@pytest.mark.process
async def test_a_window_begins_anew_where_the_server_knows_nothing_of_what_it_saw(
    tmp_path: Path, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    port = free_port()
    members = {"server": SERVER, "collections": EXAMPLE["collections"]}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with serving(tmp_path / "first", port, **members) as process:
        await Browser(process.base, session).push("notes/a", {"text": "kept here"})
        window = await page(screen, process.base, "a")
        await shows(window, "kept here")
    async with serving(tmp_path / "second", port, **members) as process:
        browser = Browser(process.base, session)
        await browser.push("notes/b", {"title": "only there"})
        await listed(window, "only there", "kept here")
        await shows(await page(screen, process.base, "a"), "kept here")


@pytest.mark.slow
async def test_a_note_that_is_rejected_says_why_and_is_saved_when_it_fits(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    window = await page(screen, base, "n")
    await write(window, "x" * 70_000)
    await window.until(f"{STATE} === 'Not saved: Payload too large'")
    await window.run("document.getElementById('text').select()")
    await window.type("short")
    await saved(window)
    assert (await Browser(base, session).pull("notes/n")).json["data"] == {"title": "", "text": "short"}


async def test_notes_are_shown_as_text_and_keep_unknown_members(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    await browser.push("notes/c", {"title": "<img src=x onerror=alert(1)>", "text": "", "colour": "red"})
    await browser.push("notes/b", {"title": 7, "text": ["no text"]})
    await browser.push("notes/a", {"text": "\r\n one\r\ntwo"})
    window = await page(screen, base, "c")
    await listed(window, "<img src=x onerror=alert(1)>", "Untitled", "one")
    await write(window, "more")
    await saved(window)
    assert (await browser.pull("notes/c")).json["data"]["colour"] == "red"
    assert (await browser.pull("notes/b")).json["data"]["title"] == 7, "nobody wrote there"


# --- deleting, history, search ---------------------------------------------------------------------------


async def press(window: Window, button: str) -> None:
    """Press a button that is shown."""
    await window.until(f"document.getElementById('{button}').offsetParent")
    await window.run(f"document.getElementById('{button}').click()")


async def test_a_note_deleted_in_one_window_is_gone_in_both_and_comes_back_by_undo(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    await browser.push("notes/n", {"title": "Shopping", "text": "milk"})
    one, other = await page(screen, base, "n"), await page(screen, base, "n")
    for window in (one, other):
        await listed(window, "Shopping")
    await press(one, "delete")
    for window in (one, other):
        await listed(window)
        await window.until("document.getElementById('hint').textContent === '“Shopping” is deleted.'")
    assert (await browser.pull("notes/n")).json["hash"] == ""
    await press(other, "undo")
    for window in (one, other):
        await listed(window, "Shopping")
    await shows(other, "milk")
    assert (await browser.pull("notes/n")).json["data"]["text"] == "milk"


async def test_a_note_that_was_never_saved_is_deleted_without_the_server(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    await Browser(base, session).push("notes/z", {"title": "loaded"})
    async with FaultProxy(base) as proxy:
        window = await page(screen, proxy.url, "n")
        await listed(window, "loaded", "Untitled")
        proxy.reset_counts()
        await press(window, "delete")
        await listed(window, "loaded")
        assert proxy.calls == {}


async def test_a_delete_spares_what_somebody_wrote_meanwhile(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    first = (await browser.push("notes/n", {"text": "seen"})).json["hash"]
    window = await page(screen, base, "n")
    await shows(window, "seen")
    await window.run("document.getElementById('text').focus()")
    await window.compose("x")  # meanwhile the page leaves the note as it is
    await browser.push("notes/n", {"text": "seen, and more"}, first)
    await press(window, "delete")
    await window.type("x")
    await window.until(f"{TEXT}.includes(', and more')")
    await saved(window)
    assert ", and more" in (await browser.pull("notes/n")).json["data"]["text"]


async def test_a_note_that_another_deletes_stays_with_what_is_written_in_it(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    first = (await browser.push("notes/n", {"text": "one"})).json["hash"]
    window = await page(screen, base, "n")
    await shows(window, "one")
    await write(window, "")
    await window.compose(", two")
    await browser.request("DELETE", f"/push/notes/n?baseHash={first}")
    await browser.push("notes/z", {"title": "told of later"})
    await listed(window, "told of later", "one, two")
    await window.type(", two")
    await saved(window)
    assert (await browser.pull("notes/n")).json["data"]["text"] == "one, two"


async def test_a_delete_whose_answer_is_lost_is_made_once(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    await browser.push("notes/n", {"text": "one"})
    async with FaultProxy(base) as proxy:
        window = await page(screen, proxy.url, "n")
        await shows(window, "one")
        proxy.lose_reply("DELETE")
        await press(window, "delete")
        await listed(window)
        assert proxy.met["lose_reply"] == 1
    assert (await browser.pull("notes/n")).json["hash"] == ""
    versions = (await browser.request("GET", "/history/notes/n")).json["versions"]
    assert [("replaced" in each) for each in versions] == [True]


@pytest.mark.process
async def test_a_window_that_was_away_does_not_bring_back_what_was_deleted(
    tmp_path: Path, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    """It hears nothing of the delete, because the change log does not reach back that far."""
    port = free_port()
    members = {"server": SERVER, "collections": EXAMPLE["collections"], "changes": {"maxCount": 1}}
    async with serving(tmp_path, port, **members) as process:
        browser = Browser(process.base, session)
        first = (await browser.push("notes/n", {"title": "deleted"})).json["hash"]
        window = await page(screen, process.base, "n")
        await listed(window, "deleted")
    async with serving(tmp_path, **members) as elsewhere:
        browser = Browser(elsewhere.base, session)
        assert (await browser.request("DELETE", f"/push/notes/n?baseHash={first}")).status == 200
        for name in "abc":
            await browser.push(f"notes/{name}", {"title": name})
    async with serving(tmp_path, port, **members) as process:
        await listed(window, "c", "b", "a")
        assert (await Browser(process.base, session).pull("notes/n")).json["hash"] == ""


async def test_an_earlier_version_is_shown_and_restored(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    first = (await browser.push("notes/n", {"title": "n", "text": "at noon"})).json["hash"]
    second = (await browser.push("notes/n", {"title": "n", "text": "in the evening"}, first)).json["hash"]
    window = await page(screen, base, "n")
    await shows(window, "in the evening")
    await press(window, "past")
    version = "document.getElementById('version').textContent"
    await window.until(f"{version} === 'n\\n\\nin the evening'")
    await browser.push("notes/n", {"title": "n", "text": "at night"}, second)
    await window.until(f"{version} === 'n\\n\\nat night'")
    await window.run("document.querySelector('#versions li:last-child button').click()")
    await window.until(f"{version} === 'n\\n\\nat noon'")
    await press(window, "restore")
    await shows(window, "at noon")
    await saved(window)
    assert (await browser.pull("notes/n")).json["data"]["text"] == "at noon"


async def test_a_search_leaves_the_notes_with_all_its_words(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    await browser.push("notes/a", {"title": "Shopping", "text": "Milk and bread"})
    await browser.push("notes/b", {"title": "Milk", "text": ""})
    window = await page(screen, base)
    await listed(window, "Milk", "Shopping")
    found = "[...document.querySelectorAll('#list a')].filter((link) => link.offsetParent).length"
    await write(window, "BREAD milk", box="search")
    assert await window.run(found) == 1
    await browser.push("notes/c", {"title": "white bread", "text": "no"})
    await listed(window, "white bread", "Milk", "Shopping")
    assert await window.run(found) == 1
    await window.run("document.getElementById('search').select()")
    await window.type("bread")
    assert await window.run(found) == 2


# --- on a phone ------------------------------------------------------------------------------------------


async def test_a_phone_shows_the_list_or_a_note(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    await Browser(base, session).push("notes/n", {"title": "Shopping", "text": "milk"})
    window = await page(screen, base)
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
    start: Start, screen: Chromium, session: aiohttp.ClientSession, width: int
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    first = (await browser.push("notes/n", {"title": "Shopping", "text": "milk"})).json["hash"]
    await browser.push("notes/n", {"title": "Shopping" * 20, "text": "milk " * 100}, first)
    window = await page(screen, base, "n")
    await window.show_as(width, 640)
    small = (
        "[...document.querySelectorAll('a, button, input, textarea')].filter((each) => each.offsetParent"
        " && each.getBoundingClientRect().height < 44).map((each) => each.id || each.textContent)"
    )
    spills = "document.documentElement.scrollWidth > innerWidth || document.body.scrollHeight > innerHeight"
    await shows(window, "milk " * 100)
    for button in ("past", "past", "fold", "delete") if width < 500 else ("past", "delete"):
        assert await window.run(small) == []
        assert not await window.run(spills)
        if button != "delete":
            await press(window, button)
        if button == "past":
            await window.until("document.querySelectorAll('#versions button').length === 2")


# --- what a page of a list holds -------------------------------------------------------------------------


async def test_more_notes_than_a_page_of_a_list_are_all_there(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    browser = Browser(base, session)
    names = [f"{number:03}" for number in range(205)]
    await asyncio.gather(*(browser.push(f"notes/{name}", {"title": name}) for name in names))
    await listed(await page(screen, base), *reversed(names))


async def test_everything_that_can_be_used_has_a_name(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    base = await service(start)
    await Browser(base, session).push("notes/n", {"title": "Shopping"})
    window = await page(screen, base, "n")
    await listed(window, "Shopping")
    assert set(await window.controls()) == {
        *(("button", name) for name in ("New note", "History", "Delete")),
        *(("textbox", name) for name in ("Title", "Text")),
        ("searchbox", "Search"),
        ("link", "Shopping"),
    }


async def test_the_page_works_from_any_web_server(
    start: Start, screen: Chromium, session: aiohttp.ClientSession
) -> None:
    elsewhere = web.Application()
    elsewhere.router.add_static("/", EXAMPLES)
    async with TestServer(elsewhere) as server:
        origin = str(server.make_url("")).rstrip("/")
        base = await service(start, cors={"origins": [origin]})
        window = await screen.open(f"{origin}/notes.html?server={base}#n")
        await window.until(f"{CONNECTION} === 'Live'")
        await write(window, "from elsewhere")
        await saved(window)
    assert (await Browser(base, session).pull("notes/n")).json["data"]["text"] == "from elsewhere"


# --- merging ---------------------------------------------------------------------------------------------


async def merged(screen: Chromium, cases: list[tuple[str, str, str]]) -> list[str]:
    """What the page's `merge` makes of each base, mine and theirs."""
    page = (EXAMPLES / "notes.html").read_text()
    code = page.split("// --- Merging")[1].split("// --- What is seen")[0].partition("\n")[2]
    window = await screen.open("about:blank")
    found: list[str] = await window.run(
        f"(() => {{ {code}; return {json.dumps(cases)}.map((texts) => merge(...texts)) }})()"
    )
    return found


async def test_a_merge_has_what_either_side_changed(screen: Chromium) -> None:
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
    found = await merged(screen, [case for case, _ in cases])
    assert found == [expected for _, expected in cases]


async def test_a_merge_loses_no_line_that_somebody_wrote(screen: Chromium) -> None:
    rng = random.Random(6)
    cases = []
    for _ in range(400):
        base = [f"{rng.choice('abcd')}\n" for _ in range(rng.randrange(12))]
        cases.append((base, edited(base, "mine", rng), edited(base, "theirs", rng)))
    found = await merged(screen, [("".join(b), "".join(m), "".join(t)) for b, m, t in cases])
    for (base, mine, theirs), text in zip(cases, found, strict=True):
        for line in mine + theirs:
            assert line in base or line.strip() in text, (base, mine, theirs, text)


async def test_a_merge_with_a_side_that_changed_nothing_is_the_other(screen: Chromium) -> None:
    rng = random.Random(7)
    base = [f"{rng.choice('abcd')}\n" for _ in range(200)]
    sides = ["".join(edited(base, "x", rng)) for _ in range(20)]
    whole = "".join(base)
    assert await merged(screen, [(whole, side, whole) for side in sides]) == sides
    assert await merged(screen, [(whole, whole, side) for side in sides]) == sides


async def test_long_texts_are_merged_in_a_moment(screen: Chromium) -> None:
    base = "".join(f"{number}\n" for number in range(12_000))
    mine, theirs = base.replace("7", "seven"), base.replace("3", "three")
    (text,) = await merged(screen, [(base, mine, theirs)])
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
