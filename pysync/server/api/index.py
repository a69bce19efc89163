"""`GET /`: a page for people who open the address of a service in a browser."""

from collections.abc import Sequence
from typing import Final

import orjson
from aiohttp import hdrs, web

from pysync.server.api.health import VERSION
from pysync.server.http.responses import Response, page_headers
from pysync.server.http.router import Match

_HTML: Final = "text/html"
_STYLE: Final = "body { font: 1rem/1.6 system-ui; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }"
_HEADERS: Final = "Cache-Control: no-cache\r\nVary: Accept\r\n" + page_headers(b"", _STYLE.encode())
_PAGE: Final = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>pysync</title>
<style>{_STYLE}</style>
<h1>pysync</h1>
<p>This server keeps documents in sync for applications.</p>
<ul>
  <li>Documentation: <code>pysync help</code>, and in the folder <code>docs/</code> of the archive and of the
    sources</li>
<items></ul>
</html>
"""


class Index:
    """The page at the root. `openapi` is the path of the description of this service, and `examples` are the
    paths of its example pages. Only operators may know the version unless `is_version_public`."""

    def __init__(self, openapi: str | None, examples: Sequence[str], *, is_version_public: bool) -> None:
        facts: dict[str, object] = dict(VERSION) if is_version_public else {"name": VERSION["name"]}
        links = [("Example", path) for path in examples]
        if openapi is not None:
            facts["openapi"] = openapi
            links.insert(0, ("Interface of this server (OpenAPI)", openapi))
        if examples:
            facts["examples"] = examples
        items = "".join(f'  <li>{text}: <a href="{path}">{path}</a></li>\n' for text, path in links)
        self._json = orjson.dumps(facts)
        self._html = _PAGE.replace("<items>", items).encode()

    async def serve(self, request: web.BaseRequest, match: Match) -> Response:
        """Return HTML to a browser, and JSON to others."""
        if _HTML in request.headers.get(hdrs.ACCEPT, ""):
            return Response(200, self._html, _HEADERS, content_type=f"{_HTML}; charset=utf-8")
        return Response(200, self._json, _HEADERS)


async def add_slash(request: web.BaseRequest, match: Match) -> Response:
    """Redirect to the same path with a slash at its end."""
    target = "/".join(("", *match.route.template, ""))
    return Response(301, b"", f"Location: {target}\r\nCache-Control: no-cache\r\n")
