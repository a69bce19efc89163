"""Files for people who try the service in a browser: those of the folder that `server.examples` names."""

import asyncio
import hashlib
import os
from pathlib import Path, PurePath
from typing import Final

from aiohttp import web

from pysync import protocol
from pysync.config.key_templates import is_parameter
from pysync.errors import NotFound
from pysync.server.answer import Answer, version_matches
from pysync.server.routes import Match

MAX_BYTES: Final = 1024 * 1024
INDEX: Final = "index.html"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# A page may hold its own script and style, and talks to the service that it comes from.
_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    "Cache-Control: no-cache\r\n"
    f"Content-Security-Policy: {_POLICY}\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "X-Content-Type-Options: nosniff\r\n"
)


class Examples:
    """The files of `folder`. Which there are is seen once, what is in them each time: who edits a page
    reloads it. Raises ValueError where there is no such folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._names = file_names(folder)

    @property
    def paths(self) -> list[str]:
        """The last segments of the paths that are served; `""` is the index."""
        return ["", *self._names] if INDEX in self._names else self._names

    async def serve(self, request: web.BaseRequest, match: Match) -> Answer:
        """The file that the route names. Raises NotFound for one that is gone, too large, or a link now."""
        name = match.route.template[-1] or INDEX
        content = await asyncio.to_thread(_read, self._folder / name)
        version = hashlib.sha256(content).hexdigest()
        headers = f'{_HEADERS}ETag: "{version}"\r\n'
        if version_matches(request.headers.get(protocol.HEADER_IF_NONE_MATCH), version):
            return Answer(304, b"", headers)
        return Answer(200, content, headers, content_type=media_type(name))


def file_names(folder: str) -> list[str]:
    """The names of the files in `folder` that are served, sorted: plain files of a known kind whose names
    have the letters of a path parameter, and no dot at the start. Raises ValueError where there is no such
    folder."""
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if _is_served(entry))
    except OSError as error:
        raise ValueError(f"server.examples: {folder}: {error.strerror}") from None


def media_type(name: str) -> str:
    """The media type of a file, or of the index for `""`."""
    return _TYPES[PurePath(name or INDEX).suffix]


def _is_served(entry: "os.DirEntry[str]") -> bool:
    name = entry.name
    is_plain = entry.is_file(follow_symlinks=False)
    return is_plain and PurePath(name).suffix in _TYPES and name[0] != "." and bool(is_parameter(name))


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_plainly) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError:
        raise NotFound from None
    if len(content) > MAX_BYTES:
        raise NotFound
    return content


def _open_plainly(path: str, flags: int) -> int:
    """Not what a link names, and without waiting for who writes to a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
