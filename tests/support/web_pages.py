"""Pages with the browser client, which the server of the test serves, and answers that a test scripts."""

from collections.abc import Callable
from typing import Any, Final

from pysync.clock import wall_clock_ms
from support.browser import Chromium, Window
from support.clients import Start
from support.configurations import ROOT

PAGES: Final = ROOT / "tests/web/pages"

WITHOUT_LOCKS: Final = "Object.defineProperty(Navigator.prototype, 'locks', {value: undefined})"
"""Runs before the page: a browser without Web Locks."""

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


def shifted_clock(ms: int) -> str:
    """Runs before the page: a clock that is wrong by so much."""
    return (
        "Date = class extends Date {"
        f" constructor(...values) {{ super(...(values.length ? values : [Date.now()])) }}"
        f" static now() {{ return super.now() + {ms} }} }}"
    )


async def web_service(
    start: Start,
    *collections: dict[str, Any],
    now_ms: Callable[[], int] = wall_clock_ms,
    **members: Any,
) -> str:
    """The base URL of a service with these collections, which serves the pages of `blank_page`."""
    server = {"examples": str(PAGES), **members.pop("server", {})}
    members = {"server": server, "collections": list(collections), **members}
    return f"{await start(members, now_ms=now_ms)}{server.get('mountPath', '')}"


async def blank_page(screen: Chromium, base: str, before: str = "") -> Window:
    """A window with a blank page of the service at `base`, in which `pysync` is the module; it is there again
    when the page is loaded again. The page has a strict Content-Security-Policy. The script `before` runs
    before the page."""
    return await screen.open(f"{base}/examples/blank.html", before)


async def client_page(screen: Chromium, base: str, before: str = "") -> Window:
    """A window in which the names of the module are global, with keys `me`."""
    window = await blank_page(screen, base, SCRIPTED + before)
    await window.run(
        "(async () => { Object.assign(window, pysync); window.me = await IdentityKeys.open() })()"
    )
    return window


async def do(window: Window, body: str, *values: Any) -> Any:
    """What a function in the page returns that has `body`, with `values` in `$`."""
    return await window.run(f"async (...$) => {{ {body} }}", *(values or (None,)))
