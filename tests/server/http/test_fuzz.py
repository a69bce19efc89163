"""Malformed requests at every route: refused with a documented error, never a 500, never stored."""

import asyncio
import base64
import json
import logging
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.clients import ISSUER, PROTOCOL, SUBJECT, Browser, Signed, Start, root_device
from support.configurations import patient
from support.depth import depth

from pysync import config
from pysync.errors import errors_by_code
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on
from pysync.store.memory import MemoryStore

CODES = set(errors_by_code())

segments = st.one_of(
    st.sampled_from(
        ["notes", "users", "rooms", "acme", "pull", "push", "_keyring", "..", "%2e", "%2F", "", "a"]
    ),
    st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), max_size=8),
)
paths = st.lists(segments, max_size=5).map("/".join)
prefixes = st.sampled_from(
    ["/pull/notes/", "/push/notes/", "/pull/users/", "/push/users/", "/pull/rooms/", "/push/rooms/",
     "/acme/pull/", "/acme/push/notes/", "/push/typed/", "/push/cards/", "/revocations",
     "/health", "/metrics", "/"]
)  # fmt: skip
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
MEMBERS = ("data", "baseHash", "authorPubkey", "authorSignature", "revoked")
bodies = st.one_of(
    st.none(),
    st.binary(max_size=60),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(MEMBERS, json_values),
    ).map(lambda value: json.dumps(value).encode()),
)
header_text = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
ids = st.one_of(st.from_regex("[0-9]{17}(-[0-9a-f]{8})?", fullmatch=True), header_text)
selections = st.fixed_dictionaries(
    {},
    optional={
        "since": st.one_of(st.just("now"), ids, st.lists(ids, min_size=3, max_size=3).map("~".join)),
        "limit": st.one_of(st.integers().map(str), header_text),
        "collections": st.one_of(st.sampled_from(["notes", "users,rooms", ","]), header_text),
        "params": json_values.map(json.dumps),
        "known": st.dictionaries(
            st.sampled_from(["notes", "users"]), st.lists(st.sampled_from([None, "0" * 16, ""]), max_size=2)
        ).map(json.dumps)
        | json_values.map(json.dumps),
        "hashes": st.one_of(st.sampled_from(["true", "false"]), header_text),
    },
)
targets = st.one_of(
    st.tuples(prefixes, paths, st.just("") | header_text.map("?{}".format)).map(
        lambda parts: "".join(parts[:2]) + parts[2].replace(" ", "+").replace("#", "%23")
    ),
    st.tuples(st.sampled_from(["/changes", "/batch/pull", "/list/notes"]), selections).map(
        lambda parts: f"{parts[0]}?{urlencode(parts[1])}"
    ),
)
certificates = st.dictionaries(
    st.sampled_from(
        ["v", "kind", "iss", "issUserId", "sub", "subKem", "scope", "nbf", "exp", "nonce", "sig", "aud"]
    ),
    st.one_of(json_values, st.sampled_from(["device", "member", "audience", ISSUER.ed_pub, ISSUER.user_id])),
).map(lambda members: "Cap " + base64.b64encode(json.dumps(members).encode()).decode())
headers = st.fixed_dictionaries(
    {},
    optional={
        "Authorization": st.one_of(header_text, certificates, header_text.map("Cap {}".format)),
        "X-Starfish-Sig": header_text,
        "X-Starfish-Ts": st.one_of(header_text, st.integers().map(str)),
        "X-Starfish-Nonce": header_text,
        "X-Starfish-Pub": header_text,
        "Content-Type": st.one_of(st.just("application/json"), header_text),
        "Content-Encoding": st.sampled_from(["gzip", "identity", "br", "x"]),
        "Idempotency-Key": header_text,
        "If-None-Match": header_text,
        "X-Request-Id": header_text,
        "X-Forwarded-For": header_text,
    },
)


class Recorder(MemoryStore):
    """Remembers what was ever put."""

    def __init__(self) -> None:
        super().__init__()
        self.put_keys: list[str] = []

    async def put(self, key: str, *arguments: Any, **options: Any) -> str:
        self.put_keys.append(key)
        return await super().put(key, *arguments, **options)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_no_malformed_request_is_a_server_error_or_leaves_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    store = Recorder()
    accepted: list[str] = []

    @settings(max_examples=depth(100, 1600), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"]),
        targets,
        bodies,
        headers,
        st.booleans(),
    )
    def attack(method: str, target: str, body: bytes | None, sent: dict[str, str], signed: bool) -> None:
        loop.run_until_complete(one(method, target, body, sent, signed))

    async def one(method: str, target: str, body: bytes | None, sent: dict[str, str], signed: bool) -> None:
        caller = Signed(base, session, SUBJECT, certificate) if signed else Browser(base, session)
        clean = {name: value.strip() for name, value in sent.items()}
        answer = await caller.request(method, target, body, clean)
        assert answer.status < 500, (method, target, answer.body)
        if answer.status >= 400 and method != "HEAD":
            assert answer.json["code"] in CODES, answer.body
        if method == "POST" and answer.status == 200:
            accepted.append(target)

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        members = json.loads(PROTOCOL.read_text()) | {"store": "memory:"}

        async def open_all() -> Any:
            app = await create_app(config.parse(patient(members)), store)
            service = serve_on(app)
            port = await service.__aenter__()
            return app, service, f"http://127.0.0.1:{port}", aiohttp.ClientSession()

        app, service, base, session = runner.run(open_all())
        certificate = root_device(SUBJECT)
        try:
            with caplog.at_level(logging.WARNING):
                attack()
        finally:
            runner.run(session.close())
            runner.run(service.__aexit__(None, None, None))
            runner.run(app.close())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(store.put_keys) == len(accepted), "what was refused was not stored"


async def test_every_documented_rejection_has_one_code(start: Start) -> None:
    kinds = list(errors_by_code().values())
    assert len({kind.code for kind in kinds}) == len(kinds)
