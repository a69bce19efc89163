"""The browser client of this version: a module that pages of any origin may import, and its types."""

from functools import cache
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web

import pysync
from pysync.server.api.examples import file_response, media_type
from pysync.server.http.responses import Response, header_lines
from pysync.server.http.router import Match

TYPES: Final = {"pysync.js": media_type("pysync.js"), "pysync.d.ts": media_type("pysync.txt")}
_ANY_ORIGIN: Final = {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: "*", "Cross-Origin-Resource-Policy": "cross-origin"}


async def serve_client(request: web.BaseRequest, match: Match) -> Response:
    """Serve the file of the route. At a path with the version it never changes."""
    *_, folder, name = match.route.template
    age = "public, max-age=31536000, immutable" if folder == pysync.__version__ else "no-cache"
    headers = {hdrs.CACHE_CONTROL: age, "X-Content-Type-Options": "nosniff"} | _ANY_ORIGIN
    return file_response(request, _content(name), header_lines(headers), TYPES[name])


@cache
def _content(name: str) -> bytes:
    """Return the text of a file, which an upgrade of the running server does not change."""
    return Path(pysync.__file__).parent.joinpath("web", name).read_bytes()
