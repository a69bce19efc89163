"""A page with the names of the browser client, and answers that a test scripts."""

from typing import Any, Final

from support.browser import Chromium, Window
from support.web_pages import module

SCRIPTED: Final = """
window.answer = (status, body, headers = {}) => new Response(
  typeof body === "string" ? body : JSON.stringify(body),
  {status, headers: {"Content-Type": "application/json", ...headers}},
)
window.PULLED = {data: {a: 1}, hash: "h1", timestamp: 5}
window.PUSHED = {hash: "h2", timestamp: 6}
// A `fetch` with an answer for each request, in their order; null for none. `sent` are the requests.
window.scripted = (...answers) => {
  const sent = []
  const fetch = async (url, options) => {
    sent.push({url, ...options})
    const next = answers.shift()
    if (next instanceof Function) return next(options)
    if (next) return next
    throw new TypeError("Failed to fetch")
  }
  return Object.assign(fetch, {sent})
}
window.QUICK = {initialS: 0, maxS: 0}
"""
"""Runs before the page: `scripted(answer(200, PULLED), null, ...)`, and a `backoff` that does not wait."""


async def client_page(screen: Chromium, base: str, before: str = "") -> Window:
    """A window in which the names of the module are global, with keys `me`."""
    window = await module(screen, base, SCRIPTED + before)
    await window.run(
        "(async () => { Object.assign(window, pysync); window.me = await IdentityKeys.open() })()"
    )
    return window


async def do(window: Window, body: str, *values: Any) -> Any:
    """What a function in the page returns that has `body`, with `values` in `$`."""
    return await window.run(f"async (...$) => {{ {body} }}", *(values or (None,)))
