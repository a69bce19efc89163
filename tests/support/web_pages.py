"""Blank pages with the browser client, which the server of the test serves."""

from collections.abc import Callable
from typing import Any, Final

from pysync.clock import wall_clock_ms
from support.browser import Chromium, Window
from support.clients import Start
from support.configurations import ROOT

PAGES: Final = ROOT / "tests/web/pages"

WITHOUT_LOCKS: Final = "Object.defineProperty(Navigator.prototype, 'locks', {value: undefined})"
"""Runs before the page: a browser without Web Locks."""


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
    """The base URL of a service with these collections, which serves the pages of `module`."""
    server = {"examples": str(PAGES), **members.pop("server", {})}
    members = {"server": server, "collections": list(collections), **members}
    return f"{await start(members, now_ms=now_ms)}{server.get('mountPath', '')}"


async def module(screen: Chromium, base: str, before: str = "") -> Window:
    """A window with a blank page of the service at `base`, in which `pysync` is the module; it is there again
    when the page is loaded again. The page has a strict Content-Security-Policy. The script `before` runs
    before the page."""
    return await screen.open(f"{base}/examples/blank.html", before)
