"""A replica in a browser seals what its page says, whatever the server says of its collections."""

from typing import Any

import pytest
from support.browser import Chromium, Window
from support.clients import Start
from support.web_pages import client_page, do, web_service

KEY = "vault/me/1"
SECRET = {"secret": "the combination of the safe"}
VAULT, NOTES = {"vault": "vault/{identity}/{id}"}, {"notes": "notes/{id}"}
SWAPPED = {"vault": "elsewhere/{id}", "notes": "vault/{identity}/{id}"}
UNTRUSTED = """
// A server without documents, which names the key templates of its choice.
window.pushed = []
window.untrusted = async (url, {body}) => {
  const {pathname} = new URL(url), page = {changes: [], cursor: "1", hasMore: false, storagePaths: templates}
  if (pathname === "/changes") return answer(200, page)
  if (!pathname.startsWith("/push/")) return answer(404, {})
  pushed.push(JSON.parse(new TextDecoder().decode(body)).data)
  return answer(200, {hash: "1".repeat(64), timestamp: 1})
}
// A replica of these collections, which has received what the server has. `ring` marks what it seals.
window.ring = {seal: (data) => ({sealed: data}), open: ({sealed}) => sealed}
window.opened = async (templates, names, sealing) => {
  window.templates = templates
  const collections = Object.fromEntries(names.map((name) => [name, {}]))
  const backoff = {attempts: 1, initialS: 0.01, maxS: 0.01}
  const client = new Client("http://h", {fetch: untrusted, backoff})
  window.replica = await Replica.open("app", client, collections, {sealing})
  await replica.synced()
}
window.put = async (key, data) => {
  await replica.put(key, data)
  await replica.synced()
}
"""


@pytest.fixture
async def window(start: Start, screen: Chromium) -> Window:
    return await client_page(screen, await web_service(start), UNTRUSTED)


async def test_name_that_was_not_asked_for_does_not_take_a_key(window: Window) -> None:
    body = "await opened($[0], ['vault'], {vault: ring}); await put($[1], $[2]); return pushed"
    pushed = await do(window, body, VAULT | {"other": "vault/{identity}/1"}, KEY, SECRET)
    assert pushed == [{"sealed": SECRET}]


async def test_known_key_template_is_not_replaced(window: Window) -> None:
    body = """await opened($[0], ['vault'], {vault: ring})
    await replica.close()
    await opened($[1], ['vault', 'notes'], {vault: ring, notes: null})
    await put($[2], $[3])
    return pushed"""
    pushed = await do(window, body, VAULT, {"vault": "elsewhere/{id}"} | NOTES, KEY, SECRET)
    assert pushed == [{"sealed": SECRET}]


async def test_collection_whose_key_template_is_missing_is_an_error_of_the_status(window: Window) -> None:
    body = """await opened($[0], ['vault', 'notes'], {vault: ring, notes: null})
    await put("notes/a", {n: 1})
    return [(await replica.status()).error.name, pushed]"""
    assert await do(window, body, NOTES) == ["UnknownCollection", [{"n": 1}]]


@pytest.mark.parametrize("templates", [SWAPPED, VAULT | {"notes": "vault/{identity}/1"}])
async def test_edit_of_a_collection_that_sealing_does_not_name_is_rejected(
    window: Window, templates: dict[str, Any]
) -> None:
    body = """await opened($[0], ['vault', 'notes'], {vault: ring})
    await put($[1], $[2])
    const {rejected: [{key, data, error}]} = await replica.status()
    return [key, data, error.name, pushed]"""
    shown = await do(window, body, templates, KEY, SECRET)
    assert shown == [KEY, SECRET, "UnknownCollection", []]


async def test_sealed_document_is_sealed_in_the_database(window: Window) -> None:
    body = """const seal = (data) => ({text: btoa(JSON.stringify(data))})
    const open = ({text}) => JSON.parse(atob(text))
    await opened($[0], ['vault'], {vault: {seal, open}})
    await put($[1], $[2])
    const opening = indexedDB.open("pysync-replica:app"), stored = []
    await new Promise((resolve) => { opening.onsuccess = resolve })
    for (const name of opening.result.objectStoreNames) {
      const reading = opening.result.transaction(name).objectStore(name).getAll()
      await new Promise((resolve) => { reading.onsuccess = resolve })
      stored.push(...reading.result)
    }
    opening.result.close()
    const all = JSON.stringify(stored)
    return [all.includes(seal($[2]).text), all.includes($[2].secret), await replica.get($[1])]"""
    assert await do(window, body, VAULT, KEY, SECRET) == [True, False, SECRET]
