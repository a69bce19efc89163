"""Who asks a server while it is measured by `overload.py`: good clients, and those who ask for too much."""

import base64
import itertools
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlencode

import orjson

from benches.holders import Holders
from benches.open_loop import Address, Poller, Reading
from benches.workloads import big_document, note, push_body
from pysync.auth import issuing, signing
from pysync.auth.certificates import SCHEME
from pysync.auth.identity_keys import IdentityKeys
from pysync.protocol import JSON_TYPE

GOOD: Final = tuple(f"127.0.1.{n}" for n in range(1, 33))
ATTACKERS: Final = tuple(f"127.0.0.{n}" for n in range(2, 13))
"""Addresses: of good clients, and of eleven attackers."""
ELSEWHERE: Final = "/pull/users/" + "0" * 32 + "/plan"
LARGEST_BATCH: Final = "/batch/pull?" + urlencode(
    {"collections": "big", "params": orjson.dumps({"big": [{"id": "largest"}] * 5})}
)


class Identity:
    """A client with a certificate of its own. Its own document is at `path`."""

    def __init__(self) -> None:
        keys = IdentityKeys.generate()
        certificate = issuing.issue_device_certificate(
            keys, keys.ed_pub, keys.kem_pub, now_s=int(time.time()), nonce=os.urandom(16)
        )
        self.text, self._authorization = certificate.text, certificate.authorization
        self._key_file = keys.to_json()
        self.path = f"users/{keys.user_id}/plan"

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_keys"}

    def pull(self, server: Address, at_s: float, headers: str = "") -> bytes:
        """A pull of its own document, signed at a time."""
        return self._signed("GET", f"/pull/{self.path}", server, at_s, headers)

    def push(self, server: Address, at_s: float) -> bytes:
        """A push that creates its own document."""
        return self._signed("POST", f"/push/{self.path}", server, at_s, body=push_body(note("plan")))

    def _signed(
        self, method: str, path: str, server: Address, at_s: float, headers: str = "", body: bytes = b""
    ) -> bytes:
        if not hasattr(self, "_keys"):
            self._keys = IdentityKeys.from_json(self._key_file)
        signature = signing.sign_request(
            self._keys, method, path, body, "{}:{}".format(*server), int(at_s * 1000), os.urandom(16)
        )
        signature["Authorization"] = self._authorization
        return request(method, path, server, signature, headers, body)


def request(
    method: str,
    path: str,
    server: Address,
    members: Mapping[str, str] | None = None,
    headers: str = "",
    body: bytes = b"",
) -> bytes:
    """The bytes of a request. `headers` are lines that end in CRLF."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (members or {}).items()) + headers
    if body:
        lines += f"Content-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: {server[0]}:{server[1]}\r\n{lines}\r\n".encode() + body


@dataclass(frozen=True, slots=True)
class Asked:
    """What attackers send to `server`: requests of a kind, each of them made when it is due."""

    server: Address
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _certificate: bytes = field(default_factory=lambda: Identity().text)

    def junk(self) -> bytes:
        """What scanners send: without credentials, with some that mean nothing, for nothing that there is,
        and one of twenty is not HTTP."""
        number = next(self._numbers)
        if number % 20 == 19:
            return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64) + b"\r\n\r\n"
        if number % 3 == 0:
            return request("GET", ELSEWHERE, self.server)
        if number % 3 == 1:
            nonsense = SCHEME + base64.b64encode(os.urandom(450)).decode()
            return request("GET", ELSEWHERE, self.server, _credentials(nonsense))
        return request("GET", f"/{os.urandom(6).hex()}/wp-login.php", self.server)

    def forged(self) -> bytes:
        """A certificate that nobody signed, no two alike."""
        expiry = orjson.loads(self._certificate)["exp"]
        changed = self._certificate.replace(b"%d" % expiry, b"%d" % (expiry + 1 + next(self._numbers)))
        return request(
            "GET", ELSEWHERE, self.server, _credentials(SCHEME + base64.b64encode(changed).decode())
        )

    def health(self) -> bytes:
        """A health probe."""
        return request("GET", "/health", self.server)


def _credentials(authorization: str) -> dict[str, str]:
    """Credentials of the right form, whose signature is none."""
    return {
        "Authorization": authorization,
        "X-Starfish-Sig": base64.b64encode(os.urandom(64)).decode(),
        "X-Starfish-Ts": str(int(time.time() * 1000)),
        "X-Starfish-Nonce": base64.b64encode(os.urandom(16)).decode(),
    }


def holders(kind: str, count: int, server: Address, poller: Poller, start: float, seconds: float) -> Holders:
    """Connections that are held: by clients that never read, that send large bodies or slow ones, that ask
    for the largest batches, or that do nothing."""
    body, numbers, tag = large_body(), itertools.count(), os.urandom(4).hex()
    json_of = f"Content-Type: {JSON_TYPE}\r\nContent-Length: "

    def pieces(number: int) -> tuple[bytes, ...]:
        if kind == "readers":
            return (request("GET", "/pull/big/megabyte", server),)
        if kind == "bodies":
            path = f"/push/big/{tag}-{next(numbers)}"
            return request("POST", path, server, headers=f"{json_of}{len(body)}\r\n"), body
        if kind == "slow":
            path = f"/push/notes/slow-{number}"
            return request("POST", path, server, headers=f"{json_of}60000\r\n"), b"{"
        return (request("GET", LARGEST_BATCH, server),) if kind == "batches" else ()

    return Holders(
        poller, server, ATTACKERS, count, pieces, start,
        reading=Reading.NEVER if kind == "readers" else Reading.ANSWERS,
        spread_s=seconds / 4 if kind in ("readers", "slow", "idle") else 0.0,
        trickle_s=2.0 if kind == "slow" else 0.0,
    )  # fmt: skip


def large_body() -> bytes:
    """A push of 4.9 MB of JSON: nested records."""
    record = big_document(0)
    return push_body(b'{"parts":[' + b",".join([record] * (4_900_000 // len(record))) + b"]}")


def stored(who: Sequence[Identity], server: Address) -> Iterator[bytes]:
    """Pushes of the documents that the others read."""
    for each in who:
        yield each.push(server, time.time())
    text = random.Random(0).randbytes(500_000).hex().encode()
    yield request("POST", "/push/big/megabyte", server, body=push_body(b'{"text":"%b"}' % text))
    yield request("POST", "/push/big/largest", server, body=large_body())
