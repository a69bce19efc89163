"""The commands that write documents to a folder of JSON files, and store those of such a folder."""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EEXIST, EILSEQ, EINVAL, EISDIR, ENAMETOOLONG, ENOTDIR, ENOTEMPTY
from pathlib import Path
from typing import Any, Final

import orjson

from pysync._core import decode_push
from pysync.cli.credentials import make_client
from pysync.cli.io import parse_object, print_json
from pysync.cli.main import OK, PROBLEM, error_message, exit_status
from pysync.cli.parser import Parser, add_client
from pysync.cli.progress import Progress
from pysync.client import BatchEntry, Client
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
    UriTooLong,
)
from pysync.protocol import MAX_BATCH_ENTRIES

VERSIONS: Final = ".pysync-export"
_NAMES: Final = {ENAMETOOLONG, EILSEQ, EINVAL, EEXIST, ENOTDIR, EISDIR, ENOTEMPTY}
"""Errors of a file system that cannot hold one name, and may hold others."""


def add_export(parser: Parser) -> None:
    """Add the arguments of `pysync export`."""
    parser.describe(
        export,
        description="Writes each document of the collections that you may read to DIR/KEY.json. Logs and "
        "files are left out. Run it again to update the folder: edited files are reported, and stay.",
        example="pysync export shopping notes\npysync export shopping tasks --param team=red --key me.json",
    )
    parser.add_value("folder", "DIR", "made if it does not exist")
    parser.add_value("collections", "COLLECTION", "names of collections", nargs="+")
    help_text = "only documents with this value of a path parameter; repeatable"
    parser.add_value("--param", "NAME=VALUE", help_text, action="append", default=[])
    add_client(parser)


def add_import(parser: Parser) -> None:
    """Add the arguments of `pysync import`."""
    parser.describe(
        import_,
        description="Stores each DIR/KEY.json as the document at KEY. A document that has changed on the "
        "server since it was exported is reported, and stays.",
        example="pysync import shopping",
    )
    parser.add_value("folder", "DIR", "made by `pysync export`, or by hand")
    parser.add_flag("--force", "replace also documents that have changed on the server")
    add_client(parser)


class Folder:
    """A folder with a file for each document, and the counts of one run. `versions` has for each key the hash
    of the document as it was exported, and that of the data in its file: the same, unless the server hides
    members. Methods raise ValueError for a key that cannot have a file, and OSError."""

    def __init__(self, path: str) -> None:
        self.root = Path(path).resolve(strict=True)
        self._log, self._part = (self.root / f"{VERSIONS}{end}" for end in ("", ".part"))
        if self._log.is_symlink() or self._part.is_symlink():
            raise ValueError(f"{self._log}: a symbolic link is in its place")
        self._log.touch()
        lines = re.findall(r"^(\S+) (\w{64}) (\w{64})$", self._log.read_text("ascii", "replace"), re.M)
        self.versions = {key: (hash_, content) for key, hash_, content in lines}
        self._ignores_case = self._log.with_name(VERSIONS.upper()).exists()
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
            self._part.write_bytes(text)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._part.replace(path)
            self.bytes += len(text)
        self.record(key, "unchanged" if found == content else "exported", hash_, content)

    def record(self, key: str, outcome: str, *version: str) -> None:
        """Count what became of a document, and note the version that its file now has."""
        self.counts[outcome] += 1
        if self.versions.get(key) != version:
            with self._log.open("a") as file:
                file.write(f"\n{' '.join((key, *version))}")  # so that an interrupted line spoils no other

    @contextmanager
    def skipping(self, key: str) -> Iterator[None]:
        """Report an error that concerns one document, and go on."""
        try:
            yield
        except (PysyncError, ValueError, OSError) as error:
            is_of_name = not isinstance(error, OSError) or error.errno in _NAMES
            if isinstance(error, RateLimited | Unauthorized | Unavailable) or not is_of_name:
                raise
            why = getattr(error, "strerror", None) or error_message(error)
            if isinstance(error, Conflict):
                why = "it has changed on the server; --force replaces it"
            self.progress.clear()
            print(f"pysync: {key}: {why}", file=sys.stderr)
            self._problems.add(exit_status(error))
            self.counts["skipped"] += 1

    def finish(self, done: str) -> int:
        """Print the counts, and return the exit status: that of the problems, if they have one."""
        print_json({name: self.counts[name] for name in (done, "unchanged", "skipped")})
        return PROBLEM if len(self._problems) > 1 else next(iter(self._problems), OK)


async def export(options: argparse.Namespace) -> int:
    """Run `pysync export`."""
    os.makedirs(options.folder, exist_ok=True)
    folder, given = Folder(options.folder), dict(each.partition("=")[::2] for each in options.param)
    async with make_client(options) as client, folder.progress:
        paths = {name: (await client.key_templates([name]))[name] for name in options.collections}
        for name in given:
            if not any(f"{{{name}}}" in path for path in paths.values()):
                raise ValueError(f"--param {name}: the keys of these collections have no such parameter")
        for name, path in paths.items():
            template = KeyTemplate.of(path)
            sets = await _list(client, name, template, given)
            folder.progress.whole = folder.counts.total() + len(sets)
            for at in range(0, len(sets), MAX_BATCH_ENTRIES):
                page = sets[at : at + MAX_BATCH_ENTRIES]
                entries: Sequence[BatchEntry | None] = [None] * len(page)
                # More than one request may have, or what no batch may have: each is pulled by itself then.
                with suppress(BadRequest, UriTooLong):
                    entries = await client.batch_pull_many(name, page)
                for params, entry in zip(page, entries, strict=True):
                    if isinstance(entry, NotFound | PullBoundRequired):
                        raise ValueError(f"{name} has no documents: it has logs or files, or is in a bundle")
                    with folder.skipping(key := template.fill(params)):
                        if isinstance(entry, PysyncError):
                            raise entry
                        pulled = entry or await client.pull(key)
                        if pulled.hash:
                            folder.write(key, pulled.data, pulled.hash)
    return folder.finish("exported")


async def _list(
    client: Client, name: str, template: KeyTemplate, given: dict[str, str]
) -> list[dict[str, str]]:
    """Return the path parameters of all documents of a collection that have the `given` ones: by its feed, or
    in a bucket, whose feed does not reach back, by its list."""
    given = {each: given[each] for each in template.params if each in given}
    found: dict[str, dict[str, str] | None] = {}
    async for page in client.change_pages(None, [name], {name: given}):
        for change in page.changes:
            found[template.fill(change.params)] = None if change.removed else dict(change.params)
        if page.is_reset:
            break
    else:
        return [params for _, params in sorted(found.items()) if params is not None]
    *above, last = template.segments
    missing = {*template.params} - {*given}
    if not missing:
        return [given]
    if missing != {last[1:-1]}:
        raise ValueError(f"{name} is at {template.text}: give --param for all parameters but the last")
    names = client.list(KeyTemplate.of("/".join(above)).fill(given))
    return [{**given, last[1:-1]: each} async for each in names]


async def import_(options: argparse.Namespace) -> int:
    """Run `pysync import`."""
    folder = Folder(options.folder)
    paths = [path.relative_to(folder.root) for path in folder.root.rglob("*.json") if path.is_file()]
    folder.progress.whole = len(paths)

    async def store(path: Path) -> None:
        with folder.skipping(key := path.as_posix().removesuffix(".json")):
            data, content = folder.read(key)
            exported = folder.versions.get(key, ("", ""))
            stored = (await client.pull(key)).hash
            if stored == content or (stored, content) == exported:
                outcome = "unchanged"
            elif stored in ("", exported[0]) or options.force:
                stored, outcome = (await client.push(key, data, stored)).hash, "imported"
            else:
                raise Conflict(stored)
            folder.record(key, outcome, stored, content)

    async with make_client(options) as client, folder.progress:
        await gather_bounded(CONCURRENT, sorted(paths), store)
    return folder.finish("imported")
