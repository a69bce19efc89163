"""Real documents through a real server: the service descriptions that botocore ships.

    python -m benches.corpus [--quick]

Each is pushed by a signed client to a document of its own, pulled back and compared value for value, its hash
checked against the plain twin of the core; then changed and pushed with its base, and a stale push refused.
"""

import argparse
import asyncio
import gzip
import importlib.util
import os
import sys
import time
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import orjson

from benches import servers
from pysync._core import content_hash
from pysync.auth import issuing
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client
from pysync.errors import Conflict

sys.path.append(str(servers.CHECKOUT / "tests"))  # where the oracle lives
from support import reference

QUICK_STEP = 20
T = TypeVar("T")


class Mismatch(Exception):
    """What the server answered is not what was pushed."""


@dataclass(frozen=True, slots=True)
class Document:
    """A service description: its path below botocore's data, and its JSON text."""

    name: str
    text: bytes


@dataclass(slots=True)
class Tally:
    """What went through: `text_bytes` of JSON in all, and the seconds that each kind of call took."""

    documents: int = 0
    text_bytes: int = 0
    largest_bytes: int = 0
    deepest: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, document: Document, depth: int) -> None:
        self.documents += 1
        self.text_bytes += len(document.text)
        self.largest_bytes = max(self.largest_bytes, len(document.text))
        self.deepest = max(self.deepest, depth)

    async def timed(self, call: str, answer: Awaitable[T]) -> T:
        started = time.perf_counter()
        try:
            return await answer
        finally:
            self.seconds[call] = self.seconds.get(call, 0.0) + time.perf_counter() - started

    def report(self) -> str:
        """The tally in Markdown."""
        megabytes = self.text_bytes / 1e6
        lines = [
            f"{self.documents:,} documents, {megabytes:,.1f} MB; the largest {self.largest_bytes / 1e6:.1f}"
            f" MB, the deepest {self.deepest} levels. All came back as they were.\n",
            "| call, one at a time | seconds | MB/s | documents/s |",
            "|---|---:|---:|---:|",
        ]
        for call, took in self.seconds.items():
            lines.append(f"| {call} | {took:.1f} | {megabytes / took:.0f} | {self.documents / took:.0f} |")
        return "\n".join(lines)


def documents(step: int = 1) -> Iterator[Document]:
    """Every `step`th description in order of path, unpacked."""
    package = importlib.util.find_spec("botocore")
    assert package is not None, "botocore comes with aiobotocore"
    assert package.origin is not None
    root = Path(package.origin).parent / "data"
    paths = sorted(path for path in root.rglob("*") if path.name.endswith((".json", ".json.gz")))
    for path in paths[::step]:
        content = path.read_bytes()
        yield Document(
            path.relative_to(root).as_posix(), gzip.decompress(content) if path.suffix == ".gz" else content
        )


async def run(base_url: str, corpus: Iterable[Document]) -> Tally:
    """Take every document through the server. Raises Mismatch at the first that does not come back."""
    keys = IdentityKeys.generate()
    certificate = issuing.issue_device_certificate(
        keys, keys.ed_pub, keys.kem_pub, now_s=int(time.time()), nonce=os.urandom(16)
    )
    tally = Tally()
    async with Client(base_url, keys=keys, certificate=certificate) as client:
        for document in corpus:
            key = f"corpus/{keys.user_id}/{document.name.replace('/', ':')}"
            await _round_trip(client, key, document, tally)
    return tally


async def _round_trip(client: Client, key: str, document: Document, tally: Tally) -> None:
    data = orjson.loads(document.text)
    changed = {**data, "changed": {"by": "corpus"}}
    expected = reference.content_hash(document.text)

    created = await tally.timed("push, create", client.push(key, data))
    _check(key, "the hash of the push", created.hash, expected)

    pulled = await tally.timed("pull", client.pull(key))
    _check(key, "the hash of the pull", pulled.hash, expected)
    # Equal values are not yet the same to JSON (true == 1 in Python), equal values with equal hashes are.
    _check(key, "the data is equal", pulled.data == data, True)
    _check(key, "the hash of the data", content_hash(orjson.dumps(pulled.data)), expected)

    updated = await tally.timed("push, update", client.push(key, changed, created.hash))
    _check(key, "the hash of the update", updated.hash, reference.content_hash(orjson.dumps(changed)))
    current = await tally.timed("push, stale", _refused(client, key, data, created.hash))
    _check(key, "the hash that refuses the stale push", current, updated.hash)

    tally.add(document, reference.depth(data))


async def _refused(client: Client, key: str, data: dict[str, object], stale: str) -> str:
    """The hash that the refusal of a stale push names."""
    try:
        await client.push(key, data, stale)
    except Conflict as conflict:
        return conflict.current_hash
    raise Mismatch(f"{key}: a stale push was accepted")


def _check(key: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Mismatch(f"{key}: {what} is {found}, expected {expected}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.corpus", description="Real documents.")
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK_STEP}th document")
    options = parser.parse_args()
    with servers.pysync() as server:
        print(asyncio.run(run(server.url, documents(QUICK_STEP if options.quick else 1))).report())


if __name__ == "__main__":
    main()
