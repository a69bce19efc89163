"""The commands that write documents to a folder of JSON files, and store those of such a folder."""

import argparse
import errno
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from pysync._core import decode_push
from pysync.cli.credentials import make_client
from pysync.cli.io import parse_object, print_json
from pysync.cli.main import OK, PROBLEM, error_message, exit_status
from pysync.cli.parser import Parser, add_client
from pysync.cli.progress import Progress
from pysync.client import Client, Unreachable
from pysync.client.client import Entries
from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.config.key_templates import KeyTemplate, is_parameter
from pysync.errors import (
    BadRequest,
    Conflict,
    NotFound,
    PullBoundRequired,
    PysyncError,
    RateLimited,
    Unauthorized,
    Unavailable,
)

VERSIONS: Final = ".pysync-export"
BATCH: Final = 100
"""Documents that are read with one request: as many as a server allows by default."""
_OF_ONE_NAME: Final = ("EEXIST", "EILSEQ", "EINVAL", "EISDIR", "ENAMETOOLONG", "ENOTDIR", "ENOTEMPTY")
"""Errors of a file system that cannot hold one name and may hold others."""


def add_export(parser: Parser) -> None:
    """Add the arguments of `pysync export`."""
    parser.describe(
        export,
        description="Writes each document of the collections that you may read to FOLDER/KEY.json. Logs and "
        "files are left out. Run it again to update the folder: edited files are reported, and stay.",
        example="pysync export folder notes\npysync export folder notes --param identity=$ME --key me.json",
    )
    parser.add_value("folder", "FOLDER", "made if it does not exist")
    parser.add_value("collections", "COLLECTION", "names of collections", nargs="+")
    help_text = "only documents with this value of a path parameter; repeatable"
    parser.add_value("--param", "NAME=VALUE", help_text, action="append", default=[])
    add_client(parser)


def add_import(parser: Parser) -> None:
    """Add the arguments of `pysync import`."""
    parser.describe(
        import_,
        description="Stores each FOLDER/KEY.json as the document at KEY. A document that has changed on the "
        "server since it was exported is reported, and stays.",
        example="pysync import folder",
    )
    parser.add_value("folder", "FOLDER", "made by `pysync export`, or by hand")
    parser.add_flag("--force", "replace also documents that have changed on the server")
    add_client(parser)


class Folder:
    """A folder with a file for each document, and the counts of one run. The file `.pysync-export` in it has
    `versions`: for each key the hash that the server gave the document, and the hash of what was written to
    the file, which differs if the server hides members. Methods raise OSError, and ValueError for a file that
    cannot be that of a document."""

    def __init__(self, path: str) -> None:
        self.root = Path(path).resolve(strict=True)
        self._versions_file = self.root / VERSIONS
        self._versions_file.touch()
        text = self._versions_file.read_bytes()
        *lines, interrupted = text.split(b"\n")
        if interrupted:
            os.truncate(self._versions_file, len(text) - len(interrupted))
        self.versions: dict[str, list[str]] = {key: hashes for key, *hashes in map(orjson.loads, lines)}
        self._ignores_case = (self.root / VERSIONS.upper()).exists()
        self._spellings: dict[str, str] = {}
        self.counts = Counter[str]()
        self.bytes = 0
        self._problems = set[int]()
        self.progress = Progress(lambda: (self.counts.total(), self.bytes))

    def path(self, key: str) -> Path:
        """Return the path of the file of a document."""
        path = self.root / f"{key}.json"
        if not all(map(is_parameter, key.split("/"))):
            raise ValueError("no document can have this key")
        if path.resolve() != path:
            raise ValueError("a symbolic link is in its place")
        if self._ignores_case and (other := self._spellings.setdefault(key.lower(), key)) != key:
            raise ValueError(f"the file system takes it for {other}")
        return path

    def read(self, key: str) -> tuple[dict[str, Any], str]:
        """Return the data in the file of a document, and its hash. Raises PysyncError as a push of it."""
        text = self.path(key).read_bytes()
        self.bytes += len(text)
        return parse_object(text, "its file"), decode_push(b'{"data":%b}' % text).hash

    def write(self, key: str, data: dict[str, Any], hash_: str) -> None:
        """Write the document that has this hash to its file, unless that was edited (ValueError)."""
        text = orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        path, content = self.path(key), decode_push(b'{"data":%b}' % text).hash
        found = self.read(key)[1] if path.exists() else None
        if found not in (None, content, *self.versions.get(key, ())[1:]):
            raise ValueError("its file was edited: import it, or delete it")
        if found != content:
            part = self.root / f"{VERSIONS}.part"
            part.write_bytes(text)
            path.parent.mkdir(parents=True, exist_ok=True)
            part.replace(path)
            self.bytes += len(text)
        self.counts["unchanged" if found == content else "exported"] += 1
        self.record(key, hash_, content)

    def record(self, key: str, *hashes: str) -> None:
        """Note which version of a document its file has."""
        if self.versions.get(key) != [*hashes]:
            self.versions[key] = [*hashes]
            with self._versions_file.open("ab") as file:
                file.write(orjson.dumps([key, *hashes], option=orjson.OPT_APPEND_NEWLINE))

    def skip(self, key: str, error: Exception) -> None:
        """Report a document that is left out, or raise an error that concerns others as well."""
        if isinstance(error, Unreachable | Unavailable | RateLimited | Unauthorized) or (
            isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) not in _OF_ONE_NAME
        ):
            raise error
        self.progress.clear()
        why = error_message(error) if not isinstance(error, OSError) else error.strerror
        if isinstance(error, Conflict):
            why = "it has changed on the server; --force replaces it"
        print(f"pysync: {key}: {why}", file=sys.stderr)
        self._problems.add(exit_status(error))
        self.counts["skipped"] += 1

    def finish(self, *names: str) -> int:
        """Print the counts, and return the exit status: that of the problems, if they have one."""
        print_json({name: self.counts[name] for name in (*names, "unchanged", "skipped")})
        return PROBLEM if len(self._problems) > 1 else next(iter(self._problems), OK)


async def export(options: argparse.Namespace) -> int:
    """Run `pysync export`."""
    os.makedirs(options.folder, exist_ok=True)
    folder, given = Folder(options.folder), dict(each.partition("=")[::2] for each in options.param)
    async with make_client(options) as client, folder.progress:
        templates = await client.key_templates()
        for name in options.collections:
            if name not in templates:
                raise ValueError(f"{name}: the server has no such collection for you")
            template = KeyTemplate.of(templates[name])
            async for sets in _pages(client, name, template, given):
                for one, entry in zip(sets, await _read(client, name, template, sets), strict=True):
                    key = template.fill(one)
                    if isinstance(entry, NotFound | PullBoundRequired):
                        raise ValueError(f"{name} has no documents: it has logs or files, or is in a bundle")
                    try:
                        if isinstance(entry, PysyncError):
                            raise entry
                        if entry.hash:
                            folder.write(key, entry.data, entry.hash)
                    except (PysyncError, ValueError, OSError) as error:
                        folder.skip(key, error)
    return folder.finish("exported")


async def _pages(
    client: Client, name: str, template: KeyTemplate, given: dict[str, str]
) -> AsyncIterator[list[dict[str, str]]]:
    """Yield the path parameters of all documents of a collection, `BATCH` at a time."""
    *above, last = template.segments
    missing = [one for one in template.params if one not in given]
    if not missing:
        yield [given]
        return
    if missing != [last[1:-1]]:
        raise ValueError(
            f"{name} has documents at {template.text}: give --param for all parameters but the last"
        )
    page = []
    async for value in client.list(KeyTemplate.of("/".join(above)).fill(given)):
        page.append({**given, missing[0]: value})
        if len(page) == BATCH:
            yield page
            page = []
    if page:
        yield page


async def _read(client: Client, name: str, template: KeyTemplate, sets: Sequence[dict[str, str]]) -> Entries:
    """Return the documents with these path parameters, or the errors that pulls of them raise."""
    try:
        return await client.batch_pull_many(name, sets)
    except BadRequest:  # too much for one request, or nothing that a batch may have
        if len(sets) > 1:
            half = len(sets) // 2
            return [
                found
                for some in (sets[:half], sets[half:])
                for found in await _read(client, name, template, some)
            ]
    try:
        return [await client.pull(template.fill(sets[0]))]
    except PysyncError as error:
        return [error]


async def import_(options: argparse.Namespace) -> int:
    """Run `pysync import`."""
    folder = Folder(options.folder)
    keys = [
        path.relative_to(folder.root).as_posix()[:-5]
        for path in folder.root.rglob("*.json")
        if path.is_file()
    ]
    folder.progress.whole = len(keys)

    async def work(key: str) -> None:
        try:
            await _store(client, folder, key, force=options.force)
        except (PysyncError, ValueError, OSError) as error:
            folder.skip(key, error)

    async with make_client(options) as client, folder.progress:
        await gather_bounded(CONCURRENT, sorted(keys), work)
    return folder.finish("imported")


async def _store(client: Client, folder: Folder, key: str, *, force: bool) -> None:
    """Store the document in a file. Raises Conflict if the server has neither that nor the version that was
    exported."""
    data, content = folder.read(key)
    base, written = folder.versions.get(key, (None, None))
    if content == written:  # it was not edited, and a push of the same data would be a change
        stored = (await client.pull(key)).hash
        if stored == base:
            folder.counts["unchanged"] += 1
            return
        if stored and not force:
            raise Conflict(current_hash=stored)
        base = stored
    while True:
        try:
            base = (await client.push(key, data, base)).hash
            folder.counts["imported"] += 1
            break
        except Conflict as conflict:
            base, tried = conflict.current_hash, base
            if base == content:  # an earlier import was interrupted, or somebody else was faster
                folder.counts["unchanged"] += 1
                break
            if base == tried or (base and not force):
                raise
    folder.record(key, base, content)
