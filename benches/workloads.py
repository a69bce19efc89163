"""What the load generator sends: one row of `WORKLOADS` per workload.

The paths belong to the collections of `service.json`; `bare-get` and `bare-post` to the application of
`bare.py`. The list workloads read what `fill-list` stores, once per server.
"""

import http.client
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Final
from urllib.parse import quote, urlsplit

import orjson

from pysync import minting, signing
from pysync._core import content_hash
from pysync.keys import Keys

DOCUMENTS: Final = 1_000
DOCUMENT_BYTES: Final = 1_024
BIG_BYTES: Final = 512 * 1_024
BIG_BODIES: Final = 8
# An update follows its create this many requests later: longer than any connection is waited for.
UPDATE_BLOCK: Final = 500
BATCH: Final = 100
# The documents of `fill-list`, which the list workloads read, and the longest page there is.
LISTED: Final = 100_000
PAGE: Final = 1_000
# Of `service.json`.
COLLECTIONS: Final = 50


class Author:
    """Makes the bytes of requests to the server at `base_url`, in the name of a device of its own.

    `tag` is in the name of every document, so that two runs on one server never meet. A signed request is
    good for one use within 300 seconds (clients-and-crypto section 2.4).
    """

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        self.tag = os.urandom(6).hex()
        self._mount = url.path.rstrip("/")
        self._netloc = url.netloc
        self._host_header = f"Host: {url.netloc}\r\n"
        self._signed_host = signing.host_of(base_url)
        self._keys = Keys.generate()
        self.identity = self._keys.user_id
        self._authorization = minting.device(
            self._keys,
            self._keys.ed_pub,
            self._keys.kem_pub,
            now_s=int(time.time()),
            nonce=os.urandom(16),
        ).authorization

    def request(self, path: str, body: bytes | None = None, headers: str = "") -> bytes:
        """A GET, or with a body a POST of JSON. `headers` are lines that end in CRLF."""
        method = "GET" if body is None else "POST"
        if body is not None:
            headers += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._mount}{path} HTTP/1.1\r\n{self._host_header}{headers}\r\n"
        return head.encode() + (body or b"")

    def signed(self, path: str, body: bytes | None = None) -> bytes:
        """As `request`, signed now."""
        signature = signing.sign_request(
            self._keys,
            "GET" if body is None else "POST",
            path,
            body or b"",
            self._signed_host,
            int(time.time() * 1000),
            os.urandom(16),
        )
        lines = "".join(f"{name}: {value}\r\n" for name, value in signature.items())
        return self.request(path, body, f"Authorization: {self._authorization}\r\n{lines}")

    def etag(self, path: str) -> str:
        """The ETag of the server's answer to a GET of `path` now. Raises RuntimeError where it has none."""
        connection = http.client.HTTPConnection(self._netloc, timeout=30)
        try:
            connection.request("GET", self._mount + path)
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
        etag = answer.getheader("ETag")
        if answer.status != 200 or etag is None:
            raise RuntimeError(f"{path[:60]} is answered {answer.status}, ETag {etag}")
        return etag


@dataclass(frozen=True, slots=True)
class Workload:
    """One row: `requests` makes at most `count` requests, each used once; `prepare` those that are answered
    before the run, unmeasured. `expect` is the status of every answer of the run, `at_least` the length in
    bytes that its body has, or the answer does not hold what it was asked for."""

    name: str
    requests: Callable[[Author, int], Iterable[bytes]]
    expect: int = 200
    prepare: Callable[[Author], list[bytes]] = lambda author: []
    count: int = 60_000
    at_least: int = 0


def note(name: str, revision: int = 0) -> bytes:
    """A document of 1 KB, as canonical text."""
    head = f'{{"done":false,"id":"{name}","revision":{revision},"tags":["garden","spring"],"text":"'
    words = "Sow the peas, turn the compost, mend the gate before the frost comes back. "
    room = DOCUMENT_BYTES - len(head) - len('"}')
    return (head + (words * (room // len(words) + 1))[:room] + '"}').encode()


def big_document(seed: int) -> bytes:
    """A document of about 512 KiB: nested records of text, numbers and lists, in no particular key order."""
    chance = random.Random(seed)
    words = ["peas", "compost", "gate", "frost", "été", "straße", "日誌", 'say "when"', "line\nbreak"]
    records: list[bytes] = []
    size = 0
    while size < BIG_BYTES - 1_024:
        record = {
            "title": " ".join(chance.choices(words, k=5)),
            "id": f"{chance.getrandbits(64):016x}",
            "position": {"y": chance.uniform(-90, 90), "x": chance.uniform(-180, 180), "layer": len(records)},
            "counts": [chance.randrange(10**6) for _ in range(8)],
            "shared": chance.random() < 0.5,
            "parent": None,
            "body": {"blocks": [{"kind": "text", "text": " ".join(chance.choices(words, k=30))}]},
        }
        records.append(orjson.dumps(record))
        size += len(records[-1]) + 1
    return b'{"records":[' + b",".join(records) + b"]}"


def push_body(data: bytes, base_hash: str | None = None) -> bytes:
    base = b"null" if base_hash is None else b'"' + base_hash.encode() + b'"'
    return b'{"data":' + data + b',"baseHash":' + base + b"}"


def _note_paths(author: Author, route: str) -> list[str]:
    return [f"/{route}/notes/{author.tag}-{n}" for n in range(DOCUMENTS)]


def _own_path(author: Author, route: str, name: str) -> str:
    return f"/{route}/users/{author.identity}/{name}"


def _create_notes(author: Author) -> list[bytes]:
    return [author.request(path, push_body(note(path))) for path in _note_paths(author, "push")]


def _create_own(author: Author) -> list[bytes]:
    paths = (_own_path(author, "push", f"n{n}") for n in range(DOCUMENTS))
    return [author.signed(path, push_body(note(path))) for path in paths]


def _bare_get(author: Author, count: int) -> list[bytes]:
    return [author.request("/")] * count


def _bare_post(author: Author, count: int) -> list[bytes]:
    return [author.request("/", push_body(note("bare")))] * count


def _pull(author: Author, count: int) -> list[bytes]:
    pulls = [author.request(path) for path in _note_paths(author, "pull")]
    return list(islice(cycle(pulls), count))


def _pull_unchanged(author: Author, count: int) -> list[bytes]:
    pushed = _note_paths(author, "push")
    pulls = [
        author.request(path, headers=f'If-None-Match: "{content_hash(note(name))}"\r\n')
        for name, path in zip(pushed, _note_paths(author, "pull"), strict=True)
    ]
    return list(islice(cycle(pulls), count))


def _signed_pull(author: Author, count: int) -> list[bytes]:
    return [author.signed(_own_path(author, "pull", f"n{n % DOCUMENTS}")) for n in range(count)]


def _push(author: Author, count: int) -> list[bytes]:
    paths = (f"/push/notes/{author.tag}-p{n}" for n in range(count))
    return [author.request(path, push_body(note(path))) for path in paths]


def _signed_push(author: Author, count: int) -> list[bytes]:
    requests = []
    for start in range(0, count // 2, UPDATE_BLOCK):
        paths = [_own_path(author, "push", f"p{n}") for n in range(start, start + UPDATE_BLOCK)]
        requests += [author.signed(path, push_body(note(path))) for path in paths]
        requests += [
            author.signed(path, push_body(note(path, revision=1), content_hash(note(path)))) for path in paths
        ]
    return requests


def _push_big(author: Author, count: int) -> Iterator[bytes]:
    # Joined while the run goes on: it costs a hundredth of the answer, and memory for 8 bodies, not `count`.
    bodies = [push_body(big_document(seed)) for seed in range(BIG_BODIES)]
    return (author.request(f"/push/big/{author.tag}-{n}", bodies[n % BIG_BODIES]) for n in range(count))


def _batch_paths(author: Author, collection: str, prefix: str) -> list[str]:
    """Batch pulls of 100 documents each that together read all of a collection's."""
    paths = []
    for start in range(0, DOCUMENTS, BATCH):
        sets = [{"id": f"{prefix}{n}"} for n in range(start, start + BATCH)]
        params = quote(orjson.dumps({collection: sets}), safe="")
        paths.append(f"/batch/pull?collections={collection}&params={params}")
    return paths


def _batch(author: Author, count: int) -> list[bytes]:
    pulls = [author.request(path) for path in _batch_paths(author, "notes", f"{author.tag}-")]
    return list(islice(cycle(pulls), count))


def _signed_batch(author: Author, count: int) -> list[bytes]:
    return [author.signed(path) for path in islice(cycle(_batch_paths(author, "private", "n")), count)]


def _batch_unchanged(author: Author, count: int) -> list[bytes]:
    paths = _batch_paths(author, "notes", f"{author.tag}-")
    pulls = [author.request(path, headers=f"If-None-Match: {author.etag(path)}\r\n") for path in paths]
    return list(islice(cycle(pulls), count))


def _fill_list(author: Author, count: int) -> Iterator[bytes]:
    return (author.request(f"/push/listed/{n:06}", push_body(note(f"{n:06}"))) for n in range(count))


def _list_first(author: Author, count: int) -> list[bytes]:
    return [author.request(f"/list/listed?limit={PAGE}")] * count


def _list_last(author: Author, count: int) -> list[bytes]:
    return [author.request(f"/list/listed?limit={PAGE}&after={LISTED - PAGE - 1:06}")] * count


def _config(author: Author, count: int) -> list[bytes]:
    return [author.request("/config")] * count


WORKLOADS: Final[dict[str, Workload]] = {
    workload.name: workload
    for workload in (
        Workload("bare-get", _bare_get, count=200_000),
        Workload("bare-post", _bare_post, count=200_000),
        Workload("pull", _pull, prepare=_create_notes, count=200_000),
        Workload("pull-304", _pull_unchanged, expect=304, prepare=_create_notes, count=200_000),
        Workload("signed-pull", _signed_pull, prepare=_create_own),
        Workload("push", _push, count=80_000),
        Workload("signed-push", _signed_push, count=40_000),
        Workload("push-512k", _push_big, count=2_000),
        Workload("batch-100", _batch, prepare=_create_notes, count=20_000, at_least=BATCH * DOCUMENT_BYTES),
        Workload(
            "batch-100-signed",
            _signed_batch,
            prepare=_create_own,
            count=15_000,
            at_least=BATCH * DOCUMENT_BYTES,
        ),
        Workload("batch-100-304", _batch_unchanged, expect=304, prepare=_create_notes, count=40_000),
        Workload("fill-list", _fill_list, count=LISTED),
        Workload("list-first", _list_first, at_least=PAGE * len('"000000",')),
        Workload("list-last", _list_last, at_least=PAGE * len('"000000",')),
        Workload("config", _config, count=100_000, at_least=COLLECTIONS * len('{"name":"notes"},')),
    )
}
