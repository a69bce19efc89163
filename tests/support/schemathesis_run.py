"""Requests that schemathesis makes from the service's description, and whether the answers are as described.

`test_schemathesis.py` runs these tests; alone: `pytest -o addopts= tests/support/schemathesis_run.py`.
"""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import schemathesis
from requests import PreparedRequest
from requests.auth import AuthBase
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.config import (
    CoveragePhaseConfig,
    GenerationConfig,
    PhasesConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pysync import config
from pysync.auth import signing
from pysync.clock import wall_clock_ms
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on
from support.clients import ISSUER, root_device
from support.collections import ROOM, UNSIGNED, collection
from support.configurations import patient
from support.depth import LONG, depth

SEED = 20261120
EXAMPLES = depth(6, 100)
SIGNED = "/(rooms|files|pages|acme|batch|config|events|changes)(/|$)"
"""The paths where it matters who asks."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

AGE = {
    "type": "object",
    "properties": {"age": {"$ref": "#/$defs/age"}},
    "$defs": {"age": {"type": "integer"}},
}
SERVICE: dict[str, Any] = {
    "version": 1,
    "store": "memory:",
    "auth": {"adminToken": "a-token-for-these-tests", "trustedIssuers": [ISSUER.ed_pub]},
    "configEndpoint": {"auth": "role-filtered"},
    "collections": [
        collection("log", appendOnly=UNSIGNED),
        collection("chat", "rooms/{room}/chat", appendOnly={"field": "said"}, **ROOM),
        collection("notes", listable=True, cacheDurationMs=1000),
        collection("typed", "typed/{x}/{y}", objectSchema=AGE, listable=True),
        collection("rooms", "rooms/{room}", listable=True, **ROOM),
        collection("title", "pages/{page}", bundle="page"),
        collection("files", allowedMimeTypes=["text/plain", "*/*"], **ROOM),
        collection("mixed", allowedMimeTypes=["application/json", "application/octet-stream"]),
        collection("draft", "pages/{page}", bundle="page", **ROOM),
        collection("cards", fieldPermissions={"salary": {"readRoles": ["admin"], "writeRoles": ["admin"]}}),
    ],
    "namespaces": {"acme": {"collections": [collection("rooms", "acme/{room}", **ROOM)]}},
}


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """A service in this process. It runs on a thread of its own, as schemathesis waits for its answers."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with await create_app(config.parse(patient(SERVICE))) as app, serve_on(app) as port:
            app.subscribers.drain()  # schemathesis waits for the end of each answer
            started.set_result((asyncio.get_running_loop(), stop, port))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    loop, stop, port = started.result()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def description() -> Any:
    """What the service says of itself to its operators."""
    async with await create_app(config.parse(patient(SERVICE))) as app:
        return json.loads(app.current.openapi.complete())


def settings() -> SchemathesisConfig:
    """The same requests on every run, none kept between runs. Methods that a path does not have are left to
    the tests of the protocol."""
    generation = GenerationConfig(max_examples=EXAMPLES, deterministic=True, database="none")
    phases = PhasesConfig(coverage=CoveragePhaseConfig(enabled=LONG, unexpected_methods=set()))
    project = ProjectConfig(generation=generation, phases=phases)
    return SchemathesisConfig(seed=SEED, projects=ProjectsConfig(default=project))


class Signer(AuthBase):
    """Signs what is about to be sent, as the trusted issuer."""

    certificate = root_device(ISSUER, collections=("rooms",))

    def __call__(self, request: PreparedRequest) -> PreparedRequest:
        body = request.body or b""
        assert isinstance(body, str | bytes), "schemathesis sends bodies whole"
        signed = signing.sign_request(
            ISSUER,
            str(request.method),
            request.path_url,
            body.encode() if isinstance(body, str) else body,
            signing.canonical_host(str(request.url)),
            wall_clock_ms(),
            os.urandom(16),
        )
        request.headers.update({"Authorization": self.certificate.authorization, **signed})
        return request


schema = schemathesis.openapi.from_dict(asyncio.run(description()), config=settings())


@schema.parametrize()
def test_answers_are_as_described(case: Case[Any], service: str) -> None:
    case.validate_response(case.call(service), checks=CHECKS)


@schema.include(path_regex=SIGNED).parametrize()
def test_answers_to_a_signed_request_are_as_described(case: Case[Any], service: str) -> None:
    case.validate_response(case.call(service, auth=Signer()), checks=CHECKS)
