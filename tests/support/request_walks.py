"""Trace the modules of pysync that a request passes through. Run as a program, as profiling is for a whole
process: prints a JSON object of module names by kind of request, in the order of their first call."""

import asyncio
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

import aiohttp

import pysync
from pysync import config
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.issuing import issue_device_certificate
from pysync.auth.signing import canonical_host, sign_request
from pysync.clock import wall_clock_ms
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on
from support.configurations import patient

PACKAGE = Path(pysync.__file__).parent
KEYS = IdentityKeys.from_private(b"\x11" * 32, b"\x31" * 32)
MINE = f"users/{KEYS.user_id}"
COLLECTIONS: list[dict[str, Any]] = [
    {"name": "pages", "storagePath": "pages/{id}", "readRoles": ["public"], "writeRoles": ["public"]},
    *(
        {
            "name": name,
            "storagePath": f"users/{{identity}}/{name}/{{id}}",
            "readRoles": ["self"],
            "writeRoles": ["self"],
            **members,
        }
        for name, members in dict[str, dict[str, Any]](
            {
                "notes": {},
                "log": {"appendOnly": {"requireAuthorSignature": False}},
                "photos": {"allowedMimeTypes": ["image/png"]},
            }
        ).items()
    ),
]
REPETITIONS = 6
"""The first fill caches; a module counts if it is passed in each of the others."""

Request = tuple[str, str, bytes | None, str]
"""Method, target, body and media type."""


class Tracer:
    """Collects the modules whose functions are called while it is on, in any thread."""

    def __init__(self) -> None:
        self.modules: dict[str, None] | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Be told of a call by the interpreter."""
        path = frame.f_code.co_filename
        if self.modules is not None and event == "call" and path.startswith(str(PACKAGE)):
            module = Path(path).relative_to(PACKAGE).with_suffix("").as_posix()
            self.modules.setdefault(module.removesuffix("/__init__"))


def requests(hashes: dict[str, str]) -> dict[str, tuple[bool, Callable[[int], Request]]]:
    """The kinds of requests: whether they are signed, and the request of each repetition."""

    def push(target: str) -> Callable[[int], Request]:
        def make(n: int) -> Request:
            body = json.dumps({"data": {"n": n}, "baseHash": hashes.get(target)}).encode()
            return "POST", target, body, "application/json"

        return make

    def pull(target: str) -> Callable[[int], Request]:
        return lambda n: ("GET", target, None, "")

    params = quote(json.dumps({"pages": [{"id": "a"}]}), safe="")
    element = json.dumps({"data": {}}).encode()
    return {
        "public push": (False, push("/push/pages/a")),
        "public pull": (False, pull("/pull/pages/a")),
        "signed push": (True, push(f"/push/{MINE}/notes/a")),
        "signed pull": (True, pull(f"/pull/{MINE}/notes/a")),
        "append": (True, lambda n: ("POST", f"/push/{MINE}/log/a", element, "application/json")),
        "file push": (True, lambda n: ("POST", f"/push/{MINE}/photos/{n}", os.urandom(2000), "image/png")),
        "batch pull": (False, pull(f"/batch/pull?collections=pages&params={params}")),
    }


async def walks(tracer: Tracer) -> dict[str, list[str]]:
    """Return the modules of each kind of request to a service with the embedded store."""
    certificate = issue_device_certificate(
        KEYS, KEYS.ed_pub, KEYS.kem_pub, now_s=wall_clock_ms() // 1000, nonce=os.urandom(16)
    )
    found: dict[str, list[str]] = {}
    hashes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"version": 1, "store": f"file:{folder}", "scrub": False}
        app = await create_app(config.parse(patient({**settings, "collections": COLLECTIONS})))
        async with app, serve_on(app) as port, aiohttp.ClientSession() as session:
            base = f"http://127.0.0.1:{port}"
            for kind, (is_signed, make) in requests(hashes).items():
                passed: list[dict[str, None]] = []
                for n in range(REPETITIONS):
                    method, target, body, media_type = make(n)
                    headers = {"Content-Type": media_type} if body else {}
                    if is_signed:
                        signed = body if body and media_type == "application/json" else b""
                        nonce, now_ms = os.urandom(16), wall_clock_ms()
                        headers |= {"Authorization": certificate.authorization}
                        headers |= sign_request(
                            KEYS, method, target, signed, canonical_host(base), now_ms, nonce
                        )
                    modules: dict[str, None] = {}
                    tracer.modules = modules
                    async with session.request(method, base + target, data=body, headers=headers) as response:
                        answer = await response.read()
                    await asyncio.to_thread(lambda: None)
                    tracer.modules = None
                    assert response.status == 200, (kind, response.status, answer)
                    hashes[target] = json.loads(answer).get("hash", "")
                    passed.append(modules)
                found[kind] = [name for name in passed[-1] if all(name in one for one in passed[1:])]
    return found


if __name__ == "__main__":
    trace = Tracer()
    threading.setprofile(trace)
    sys.setprofile(trace)
    print(json.dumps(asyncio.run(walks(trace))))
