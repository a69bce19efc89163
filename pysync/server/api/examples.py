"""Example files, for people who try the service in a browser. `server.examples` names their folder."""

import asyncio
import hashlib
import os
from pathlib import Path, PurePath
from typing import Final

from aiohttp import web

from pysync.config.key_templates import is_parameter
from pysync.errors import NotFound
from pysync.protocol import JSON_TYPE
from pysync.server.http.responses import Response, etag_matches, page_headers
from pysync.server.http.router import Match

MAX_BYTES: Final = 1024 * 1024
INDEX: Final = "index.html"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": JSON_TYPE,
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS: Final = "Cache-Control: no-cache\r\n" + page_headers(None, None)


class Examples:
    """The files of `folder`. Their names are read once, their content for each request, so that an edited
    page needs only a reload. Raises ValueError if there is no such folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        names = file_names(folder)
        self.paths = ["", *names] if INDEX in names else names
        """The last segments of the paths that are served; `""` is the index."""

    async def serve(self, request: web.BaseRequest, match: Match) -> Response:
        """Serve the file of the route. Raises NotFound if the file is gone, too large, or now a symbolic
        link."""
        name = match.route.template[-1] or INDEX
        content = await asyncio.to_thread(_read, self._folder / name)
        return file_response(request, content, _HEADERS, media_type(name))


def file_response(request: web.BaseRequest, content: bytes, headers: str, content_type: str) -> Response:
    """Return the content of a file, or 304 if the client has it already."""
    version = hashlib.sha256(content).hexdigest()
    headers = f'{headers}ETag: "{version}"\r\n'
    if etag_matches(request, version):
        return Response(304, b"", headers)
    return Response(200, content, headers, content_type=content_type)


def file_names(folder: str) -> list[str]:
    """Return the sorted names of the files in `folder` that are served: regular files of a known type whose
    names are valid path parameters and do not start with a dot. Raises ValueError if there is no such folder.
    """
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if _is_served(entry))
    except OSError as error:
        raise ValueError(f"server.examples: {folder}: {error.strerror}") from None


def media_type(name: str) -> str:
    """Return the media type of a file, or of the index for `""`."""
    return _TYPES[PurePath(name or INDEX).suffix]


def _is_served(entry: "os.DirEntry[str]") -> bool:
    name = entry.name
    is_plain = entry.is_file(follow_symlinks=False)
    return is_plain and PurePath(name).suffix in _TYPES and name[0] != "." and bool(is_parameter(name))


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open_nofollow) as file:
            content = file.read(MAX_BYTES + 1)
    except OSError:
        raise NotFound from None
    if len(content) > MAX_BYTES:
        raise NotFound
    return content


def _open_nofollow(path: str, flags: int) -> int:
    """Open a file, but not through a symbolic link, and without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
