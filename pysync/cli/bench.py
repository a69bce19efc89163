"""`pysync bench`: a load test of the given collections, according to the server's manifest."""

import argparse
import dataclasses
import gc
import json
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import orjson
import uvloop

from pysync.cli import load_generator
from pysync.cli.credentials import load_credentials, make_client
from pysync.cli.load_generator import Rejected, RequestBuilder
from pysync.cli.parser import Parser, add_client
from pysync.client import CollectionInfo
from pysync.config import key_templates
from pysync.errors import Forbidden, NotFound
from pysync.protocol import JSON_TYPE

READ: Final = 1_000
"""Documents, or files, that are made to be pulled."""
TAIL: Final = 20
"""Elements of a log that one pull asks for."""


def add_bench(parser: Parser) -> None:
    """Add the arguments of `pysync bench`."""
    parser.describe(
        bench,
        description="Pushes new documents, then pulls some of them. For a log, appends elements and pulls "
        "the newest ones. The server's manifest says what a collection holds. Nothing is deleted afterwards: "
        "name collections that exist for this purpose.",
        example="pysync bench scratch --seconds 5",
    )
    parser.add_value(
        "collection",
        "NAME[=KEY]",
        "a collection and its key template (default: NAME/{id}); {identity}: your user id",
        nargs="+",
    )
    parser.add_argument("--action", choices=("push", "pull"), help="run only this one (default: both)")
    for option, kind, default, text in (
        ("--seconds", float, 3.0, "duration of each run (default: 3)"),
        ("--count", int, 20_000, "maximum requests of each run (default: 20000)"),
        ("--connections", int, 32, "concurrent requests (default: 32)"),
        ("--bytes", int, 1_024, "size of each document or element (default: 1024)"),
    ):
        parser.add_argument(option, type=kind, default=default, help=text)
    parser.add_flag("--json", "print each run as a JSON object, one a line")
    add_client(parser)


class _Workload(NamedTuple):
    name: str
    requests: Callable[[], Iterable[bytes]]
    prepare: list[bytes]
    explain: Callable[[int], str]
    """Returns why the requests are answered 401 or 403."""


def bench(options: argparse.Namespace) -> int:
    """Run the load test. The exit status is 1 if any response was not 200, and 4 if the credentials are
    rejected, which ends it."""
    gc.disable()  # nothing here makes cycles, and a pause would be taken for the server's
    try:
        return uvloop.run(_bench(options))
    except RuntimeError as error:  # what was to be read cannot be made
        raise ValueError(str(error)) from None
    finally:
        gc.enable()


async def _bench(options: argparse.Namespace) -> int:
    async with make_client(options) as client:
        try:
            manifest = await client.server_config()
        except NotFound:
            raise ValueError("the server has no manifest of its collections: set configEndpoint") from None
    known = {found.name: found for found in manifest.collections}
    workloads: list[_Workload] = []
    for argument in options.collection:
        name, _, key = argument.partition("=")
        if name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(f"the server has no collection {name}; it has: {names}")
        workloads += _Load(options, known[name], key or f"{name}/{{id}}").workloads()
    if not options.json:
        print(load_generator.HEADER)
    failed = False
    for workload in workloads:
        try:
            run = await load_generator.measure(
                options.server,
                workload.name,
                workload.requests,
                workload.prepare,
                seconds=options.seconds,
                connections=options.connections,
            )
        except Rejected as rejected:
            raise Forbidden(f"{workload.name}: {workload.explain(rejected.status)}") from None
        print(json.dumps(dataclasses.asdict(run)) if options.json else load_generator.row(run), flush=True)
        failed = failed or bool(run.errors)
    return int(failed)


class _Load:
    """The load on one collection. `key` is the template of its keys: `{identity}` stands for the caller's
    user id, the last parameter for a new name each time, any other for one name that all requests share."""

    def __init__(self, options: argparse.Namespace, collection: CollectionInfo, key: str) -> None:
        faults = ", ".join(key_templates.errors(key))
        if faults:
            raise ValueError(f"{key} is not a key template: it {faults}")
        self._options = options
        self._collection = collection
        keys, certificate, self._token = load_credentials(options)
        self._signs = keys is not None
        self._author = RequestBuilder(options.server, keys, certificate)
        self._prefix = "" if options.namespace is None else f"/v1/{options.namespace}"
        names = key_templates.KeyTemplate.of(key).params
        if "identity" in names and not self._signs:
            raise ValueError("{identity} stands for the user id of a key: pass --key")
        self._key = key
        self._free = [name for name in names if name != "identity"]

    def workloads(self) -> list[_Workload]:
        """Return the run that writes and the run that reads. Raises ValueError if neither is possible."""
        found, action = self._collection, self._options.action
        is_log = found.append_only is not None
        made = []
        if action != "pull" and not found.pull_only:
            made.append(self._append() if is_log else self._push())
        if action != "push" and not found.push_only:
            made.append(self._tail() if is_log else self._pull())
        if not made:
            verb = "pushed to" if action == "push" else "pulled"
            raise ValueError(f"nothing to do: {found.name} is not {verb}")
        return made

    def _push(self) -> _Workload:
        if not self._free:
            raise ValueError(f"each push needs a new name, and {self._key} has no parameter for it")
        return self._workload("push", lambda n: self._push_request(f"p{n}"), [])

    def _pull(self) -> _Workload:
        if self._collection.pull_only and self._free:
            name = self._collection.name
            raise ValueError(f"{name} cannot be pushed to: name an existing document, as {name}=KEY")
        names = [f"r{n}" for n in range(min(READ, self._options.count))] if self._free else [""]
        prepare = [self._push_request(name) for name in names if self._free]
        return self._workload("pull", lambda n: self._signed_request("pull", names[n % len(names)]), prepare)

    def _append(self) -> _Workload:
        return self._workload("append", self._append_request, [])

    def _tail(self) -> _Workload:
        prepare = [] if self._collection.pull_only else [self._append_request(n) for n in range(TAIL)]
        return self._workload("tail", lambda n: self._signed_request("pull", "log", f"?last={TAIL}"), prepare)

    def _workload(self, verb: str, request: Callable[[int], bytes], prepare: list[bytes]) -> _Workload:
        """Return the run whose n-th request is `request(n)`."""
        count = self._options.count
        name = f"{self._collection.name} {verb}"
        return _Workload(name, lambda: [request(n) for n in range(count)], prepare, self._explain)

    def _explain(self, status: int) -> str:
        """Return why requests are answered 401 or 403, and which credentials they have."""
        if not self._signs and not self._token:
            return f"{status}: the requests have no credentials; add --key FILE"
        given = f"the key of the user {self._author.identity}" if self._signs else "the admin token"
        if status == 401:
            return f"{status}: the server does not accept {given}; give another one"
        return f"{status}: {given} may not use {self._collection.name}; give another one"

    def _append_request(self, n: int) -> bytes:
        needs_proof = (self._collection.append_only or {}).get("requireAuthorSignature") is not False
        if needs_proof and not self._signs:
            raise ValueError(f"appends to {self._collection.name} need an author proof: pass --key")
        data = self._data(f"e{n}")
        proof = self._author.proof(self._document_key("log"), data) if needs_proof else {}
        body = orjson.dumps({"data": orjson.Fragment(data), **proof})
        return self._signed_request("push", "log", body=body)

    def _push_request(self, name: str) -> bytes:
        types = self._collection.allowed_mime_types
        if JSON_TYPE in types:
            return self._signed_request("push", name, body=b'{"data":%b,"baseHash":null}' % self._data(name))
        content_type = next((one for one in types if "*" not in one), types[0].replace("*", "x-bench"))
        return self._signed_request("push", name, body=self._data(name), content_type=content_type)

    def _data(self, name: str) -> bytes:
        size, most = self._options.bytes, self._collection.max_body_bytes
        if size > most:
            raise ValueError(
                f"{self._collection.name} accepts at most {most} bytes per body; pass a smaller --bytes"
            )
        return load_generator.padded_object(f'{{"id":"{name}","text":"', size)

    def _document_key(self, name: str) -> str:
        """The key of a document."""
        values = dict.fromkeys(self._free, f"bench-{self._author.tag}")
        if self._free:
            values[self._free[-1]] += f"-{name}"
        values["identity"] = self._author.identity
        return key_templates.KeyTemplate.of(self._key).fill(values)

    def _signed_request(
        self,
        action: str,
        name: str,
        query: str = "",
        body: bytes | None = None,
        content_type: str = JSON_TYPE,
    ) -> bytes:
        path = f"{self._prefix}/{action}/{self._document_key(name)}{query}"
        if self._signs:
            return self._author.signed(path, body, content_type)
        bearer = f"Authorization: Bearer {self._token}\r\n" if self._token else ""
        return self._author.request(path, body, bearer, content_type)
