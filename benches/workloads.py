"""What the load generator sends: one row of `WORKLOADS` per workload.

The paths belong to the collections of `service.json`, that of `events` to the one of `events.json`;
`bare-get`, `bare-post` and `bare-mebibyte` to the application of `bare.py`. The list workloads read what
`fill-list` stores, the tails are of the log that `fill-log` appends to, once per server.
"""

import http.client
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import cycle, islice
from typing import Final
from urllib.parse import quote

import orjson

from benches.batches import event_batches
from pysync._core import content_hash
from pysync.cli import load_generator
from pysync.cli.load_generator import padded_object

DOCUMENTS: Final = 1_000
DOCUMENT_BYTES: Final = 1_024
BIG_BYTES: Final = 512 * 1_024
BIG_BODIES: Final = 8
FILES: Final = 16
FILE_BYTES: Final = 1_048_576
FILE_TYPE: Final = "application/octet-stream"
# An update follows its create this many requests later: longer than any connection is waited for.
UPDATE_BLOCK: Final = 500
BATCH: Final = 100
# The documents of `fill-list`, which the list workloads read, and the longest page there is.
LISTED: Final = 100_000
PAGE: Final = 1_000
PAGE_BYTES: Final = PAGE * len('"000000",')
# Of `service.json`.
COLLECTIONS: Final = 50
# `data` of a log's element; the element as it is read back, without proof: '{"ts":...,"data":...}'.
ELEMENT_DATA_BYTES: Final = 200
ELEMENT_BYTES: Final = len('{"ts":1700000000000,"data":}') + ELEMENT_DATA_BYTES
# The logs of `append-1000`; the elements of `fill-log`, and of a tail.
LOGS: Final = 1_000
LOGGED: Final = 1_000_000
TAIL: Final = 20


class Author(load_generator.RequestBuilder):
    """An author who can ask as well."""

    def etag(self, path: str) -> str:
        """The ETag of the server's answer to a GET of `path` now. Raises RuntimeError where it has none."""
        etag, _ = self._ask(path)
        if etag is None:
            raise RuntimeError(f"{path[:60]} is answered without an ETag")
        return etag

    def times(self, path: str) -> list[int]:
        """The times of a log's elements, as a GET of `path` tells them now. Raises RuntimeError where it is
        refused."""
        _, body = self._ask(path)
        return [element["ts"] for element in orjson.loads(body)["data"]["items"]]

    def _ask(self, path: str) -> tuple[str | None, bytes]:
        """ETag and body of the answer to a GET. Raises RuntimeError where it is refused."""
        connection = http.client.HTTPConnection(self._netloc, timeout=30)
        try:
            connection.request("GET", self._mount + path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path[:60]} is answered {answer.status}")
        return answer.getheader("ETag"), body


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
    return padded_object(head, DOCUMENT_BYTES)


def element_data(number: int) -> bytes:
    """`data` of an element of a log, 200 bytes, as canonical text."""
    return padded_object(f'{{"n":{number},"text":"', ELEMENT_DATA_BYTES)


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


def append_body(data: bytes, proof: Mapping[str, str] | None = None) -> bytes:
    return orjson.dumps({"data": orjson.Fragment(data), **(proof or {})})


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


def _bare_mebibyte(author: Author, count: int) -> list[bytes]:
    return [author.request("/mebibyte")] * count


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


def file_body(seed: int) -> bytes:
    """A file of 1 MiB that cannot be compressed."""
    return random.Random(seed).randbytes(FILE_BYTES)


def _file_paths(author: Author, route: str) -> list[str]:
    return [f"/{route}/files/{author.tag}-{n}" for n in range(FILES)]


def _create_files(author: Author) -> list[bytes]:
    paths = _file_paths(author, "push")
    return [author.request(path, file_body(n), content_type=FILE_TYPE) for n, path in enumerate(paths)]


def _pull_file(author: Author, count: int) -> list[bytes]:
    return list(islice(cycle([author.request(path) for path in _file_paths(author, "pull")]), count))


def _pull_file_unchanged(author: Author, count: int) -> list[bytes]:
    pulls = [
        author.request(path, headers=f'If-None-Match: "{sha256(file_body(n)).hexdigest()}"\r\n')
        for n, path in enumerate(_file_paths(author, "pull"))
    ]
    return list(islice(cycle(pulls), count))


def _push_file(author: Author, count: int) -> Iterator[bytes]:
    bodies = [file_body(seed) for seed in range(FILES)]
    return (
        author.request(f"/push/files/{author.tag}-p{n}", bodies[n % FILES], content_type=FILE_TYPE)
        for n in range(count)
    )


def _push_events(author: Author, count: int) -> Iterator[bytes]:
    return (author.request(f"/push/events/{author.tag}/new", body) for body in event_batches(count))


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


def _append(author: Author, count: int) -> list[bytes]:
    path = f"/push/logs/{author.tag}"
    return [author.request(path, append_body(element_data(n))) for n in range(count)]


def _begin_logs(author: Author) -> list[bytes]:
    return _append_in_turn(author, LOGS)


def _append_in_turn(author: Author, count: int) -> list[bytes]:
    paths = [f"/push/logs/{author.tag}-{n}" for n in range(LOGS)]
    return [author.request(paths[n % LOGS], append_body(element_data(n))) for n in range(count)]


def _signed_append(author: Author, count: int) -> list[bytes]:
    key = f"signed-logs/{author.identity}/{author.tag}"
    elements = map(element_data, range(count))
    return [author.signed(f"/push/{key}", append_body(data, author.proof(key, data))) for data in elements]


def _fill(name: str) -> Callable[[Author, int], Iterator[bytes]]:
    """Appends to one log, made while the run goes on."""
    return lambda author, count: (
        author.request(f"/push/logs/{name}", append_body(element_data(n))) for n in range(count)
    )


def _log_last(author: Author, count: int) -> list[bytes]:
    return [author.request(f"/pull/logs/long?last={TAIL}")] * count


def _log_checkpoint(author: Author, count: int) -> list[bytes]:
    before, *_ = author.times(f"/pull/logs/long?last={TAIL + 1}")
    return [author.request(f"/pull/logs/long?checkpoint={before}")] * count


def _config(author: Author, count: int) -> list[bytes]:
    return [author.request("/config")] * count


WORKLOADS: Final[dict[str, Workload]] = {
    workload.name: workload
    for workload in (
        Workload("bare-get", _bare_get, count=200_000),
        Workload("bare-post", _bare_post, count=200_000),
        Workload("bare-mebibyte", _bare_mebibyte, at_least=FILE_BYTES),
        Workload("pull", _pull, prepare=_create_notes, count=200_000),
        Workload("pull-304", _pull_unchanged, expect=304, prepare=_create_notes, count=200_000),
        Workload("signed-pull", _signed_pull, prepare=_create_own),
        Workload("push", _push, count=80_000),
        Workload("signed-push", _signed_push, count=40_000),
        Workload("push-512k", _push_big, count=2_000),
        Workload("file-pull", _pull_file, prepare=_create_files, at_least=FILE_BYTES),
        Workload("file-pull-304", _pull_file_unchanged, expect=304, prepare=_create_files, count=200_000),
        Workload("file-push", _push_file, count=1_000),
        Workload("events", _push_events, count=20_000),
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
        Workload("list-first", _list_first, at_least=PAGE_BYTES),
        Workload("list-last", _list_last, at_least=PAGE_BYTES),
        Workload("append", _append, count=80_000),
        Workload("append-1000", _append_in_turn, prepare=_begin_logs, count=80_000),
        Workload("signed-append", _signed_append, count=30_000),
        Workload("fill-log", _fill("long"), count=LOGGED),
        Workload("log-last", _log_last, count=120_000, at_least=TAIL * ELEMENT_BYTES),
        Workload("log-checkpoint", _log_checkpoint, count=120_000, at_least=TAIL * ELEMENT_BYTES),
        Workload("config", _config, count=100_000, at_least=COLLECTIONS * len('{"name":"notes"},')),
    )
}
