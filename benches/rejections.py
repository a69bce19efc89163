"""Refused requests: what each kind costs the server, and rate limits, beside requests that are not counted.

    python -m benches.rejections [--quick] [--rounds N] [--requests N]

The server has one worker, on core 0, with `service.json`, two collections with a rate limit, and a folder on
disk; this process is on core 1 and sends one request after the other on one connection, of each kind from an
address of its own. A figure is CPU time of the server's process, all its threads, for each answer: the median
of the rounds, the lowest and the highest beside it. A round measures every kind once. Requests are made, and
signed, before they are measured; a status other than the expected one fails the run.
"""

import argparse
import base64
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import orjson

from benches import servers
from benches.compare import machine
from benches.servers import Running
from pysync.auth import issuing, signing
from pysync.auth.certificates import SCHEME
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.issuing import FULL_ACCESS, Grant
from pysync.cli.load_generator import cpu_s, read_head

ROUNDS: Final = 5
REQUESTS: Final = 400
KEYS: Final = quote(orjson.dumps({"private": [{"id": f"n{n:02d}"} for n in range(100)]}))
BATCH: Final = f"/batch/pull?collections=private&params={KEYS}"
ELSEWHERE: Final = "/pull/users/" + "0" * 32 + "/plan"
DENIES: Final = Grant(("read", "list", "write"), ("**", *(f"!{'*a' * 18}{n:02d}" for n in range(64))))
HOUR_MS: Final = 3_600_000
LISTED: Final = (2_700, 169)
"""Entries of a revocation list, the longest first that anybody was ever allowed."""


class Stranger:
    """Somebody with fresh keys, and a certificate that they signed for themselves."""

    def __init__(self, url: str, grant: Grant = FULL_ACCESS, collections: tuple[str, ...] = ("*",)) -> None:
        self.keys = IdentityKeys.generate()
        self._host = urlsplit(url).netloc
        self._signed_host = signing.canonical_host(url)
        self.certificate = issuing.issue_device_certificate(
            self.keys,
            self.keys.ed_pub,
            self.keys.kem_pub,
            now_s=int(time.time()),
            nonce=os.urandom(16),
            grant=grant,
            collections=collections,
        )
        self.authorization = self.certificate.authorization

    def request(self, path: str, *, spoilt: bool = False) -> bytes:
        """A signed GET; `spoilt`: its signature does not hold."""
        headers = signing.sign_request(
            self.keys, "GET", path, b"", self._signed_host, int(time.time() * 1000), os.urandom(16)
        )
        if spoilt:
            headers["X-Starfish-Sig"] = base64.b64encode(os.urandom(64)).decode()
        lines = "".join(
            f"{name}: {value}\r\n" for name, value in {"Authorization": self.authorization, **headers}.items()
        )
        return f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n{lines}\r\n".encode()

    def forge(self) -> None:
        """Change the certificate, each time to another one, which nobody signs again."""
        members = orjson.loads(self.authorization_text())
        members["exp"] += 1
        self.authorization = SCHEME + base64.b64encode(orjson.dumps(members)).decode()

    def authorization_text(self) -> bytes:
        """The certificate as it is presented."""
        return base64.b64decode(self.authorization.removeprefix(SCHEME))

    def forged_request(self, path: str) -> bytes:
        """A signed GET with a forged certificate that was never presented before."""
        self.forge()
        return self.request(path)


class Connection:
    """One keep-alive connection from the address `source`, one request at a time."""

    def __init__(self, url: str, source: str = "") -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection(
            (str(address.hostname), address.port or 80), source_address=(source, 0) if source else None
        )
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *raised: object) -> None:
        self._socket.close()

    def ask(self, request: bytes) -> int:
        """The status of the answer, which is read to its end. Raises RuntimeError where there is none."""
        self._socket.sendall(request)
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._receive()
        status, length = read_head(answer[: end + 2])
        while len(answer) < end + 4 + length:
            answer += self._receive()
        return status

    def _receive(self) -> bytes:
        data = self._socket.recv(65_536)
        if not data:
            raise RuntimeError("the server closed the connection")
        return data


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind, each used once, and how they are answered. `before` are sent before them in each
    round, unmeasured, and answered somehow."""

    name: str
    status: int
    make: Callable[[], bytes]
    is_repeated: bool = False
    before: Sequence[bytes] = ()


@contextmanager
def serving(folder: Path, core: int | None = None) -> Iterator[Running]:
    """The server that is measured."""
    members = orjson.loads(servers.SERVICE.read_bytes())
    for name, most in (("counted", 1_000_000), ("limited", 1)):
        limit = {"pull": {"windowMs": HOUR_MS, "maxRequests": most}}
        for path, roles in ((f"{name}/{{id}}", ["public"]), (f"own-{name}/{{identity}}/{{id}}", ["self"])):
            members["collections"].append(
                {
                    "name": path.partition("/")[0],
                    "storagePath": path,
                    "readRoles": roles,
                    "writeRoles": roles,
                    "rateLimit": limit,
                }
            )
    members["server"] = {"maxQueueMs": 60_000}  # nothing is refused because others are at work
    config = folder.with_name("rejections.json")
    config.write_bytes(orjson.dumps(members))
    with servers.serving(folder, core, config=config) as server:
        yield server


def kinds(server: Running) -> list[Kind]:
    """The requests that are refused, and the state that the server needs for that."""
    url = server.url
    plain = f"HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n"
    long_forged = Stranger(url, collections=_collections(700))
    long_forged.forge()
    denies, wide = Stranger(url, DENIES), Stranger(url, collections=_collections(700))
    stranger, revoker, self_reader = Stranger(url), Stranger(url), Stranger(url)
    anew = Stranger(url)
    listed = _publish(url, revoker)
    me = self_reader.keys.user_id
    home, own_counted, own_limited = (
        f"/pull/users/{me}/plan",
        f"/pull/own-counted/{me}/plan",
        f"/pull/own-limited/{me}/plan",
    )
    limited = f"GET /pull/limited/plan {plain}".encode()
    return [
        Kind("404", 404, lambda: f"GET /nowhere {plain}".encode()),
        Kind("unsigned, 401", 401, lambda: f"GET {ELSEWHERE} {plain}".encode()),
        Kind("forged certificate, 401", 401, partial(anew.forged_request, ELSEWHERE)),
        Kind("forged certificate of 700 collections, 401", 401, partial(long_forged.request, ELSEWHERE)),
        Kind("700 collections, wrong signature, 401", 401, partial(wide.request, ELSEWHERE, spoilt=True)),
        Kind("64 denies, wrong signature, 401", 401, partial(denies.request, ELSEWHERE, spoilt=True)),
        Kind("64 denies x 100 keys, wrong signature, 200", 200, partial(denies.request, BATCH, spoilt=True)),
        Kind("64 denies x 100 keys, unsigned, 200", 200, lambda: f"GET {BATCH} {plain}".encode()),
        Kind("stranger, 403", 403, partial(stranger.request, ELSEWHERE)),
        Kind(f"stranger with a revocation list of {listed:,} entries, 403", 403,
             partial(revoker.request, ELSEWHERE)),
        Kind("stranger with 700 collections, 403", 403, partial(wide.request, ELSEWHERE)),
        Kind("replay, 401", 401, partial(self_reader.request, home), is_repeated=True),
        Kind("public pull, 200", 200, lambda: f"GET /pull/notes/plan {plain}".encode()),
        Kind("public pull, counted, 200", 200, lambda: f"GET /pull/counted/plan {plain}".encode()),
        Kind("public pull, over its limit, 429", 429, lambda: limited, before=[limited] * 2),
        Kind("signed pull, 200", 200, partial(self_reader.request, home)),
        Kind("signed pull, counted, 200", 200, partial(self_reader.request, own_counted)),
        Kind("signed pull, over its limit, 429", 429, partial(self_reader.request, own_limited),
             before=[self_reader.request(own_limited) for _ in range(2)]),
    ]  # fmt: skip


def measure(server: Running, found: Iterable[Kind], rounds: int, requests: int) -> dict[str, list[float]]:
    """CPU microseconds for each answer, by kind, of every round."""
    each_us: dict[str, list[float]] = {}
    found = list(found)
    with ExitStack() as opened:
        connections = [
            opened.enter_context(Connection(server.url, f"127.0.3.{number}"))
            for number in range(1, len(found) + 1)
        ]
        for _ in range(rounds):
            for kind, connection in zip(found, connections, strict=True):
                made = [kind.make() for _ in range(requests)]
                for request in kind.before:
                    connection.ask(request)
                if kind.is_repeated:
                    _answered(connection, made, 200)
                used = cpu_s(server.pid)
                _answered(connection, made, kind.status)
                each_us.setdefault(kind.name, []).append((cpu_s(server.pid) - used) / requests * 1e6)
    return each_us


def table(each_us: dict[str, list[float]]) -> str:
    lines = ["| refused request | CPU us: median (lowest to highest) |", "|---|---:|"]
    lines += [
        f"| {name} | {statistics.median(figures):,.0f} ({min(figures):,.0f} to {max(figures):,.0f}) |"
        for name, figures in each_us.items()
    ]
    return "\n".join(lines)


def _answered(connection: Connection, requests: Iterable[bytes], status: int) -> None:
    for request in requests:
        answered = connection.ask(request)
        if answered != status:
            raise RuntimeError(f"{request[:60]!r} is answered {answered}, not {status}")


def _collections(count: int) -> tuple[str, ...]:
    return tuple(f"c{n}" for n in range(count))


def _publish(url: str, issuer: Stranger) -> int:
    """Publish the longest revocation list that is taken, and return how many entries it has."""
    with Connection(url) as connection:
        for count in LISTED:
            subjects = [(f"{n:064x}", 2**40) for n in range(count)]
            text = issuing.issue_revocation_list(issuer.keys, 1, subjects=subjects).text
            head = f"POST /revocations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
            if connection.ask(f"{head}Content-Type: application/json\r\n\r\n".encode() + text) == 200:
                return count
    raise RuntimeError("no revocation list is taken")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.rejections", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few requests, two rounds: to see that it works")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each kind, in each round")
    options = parser.parse_args()
    rounds, requests = (2, 20) if options.quick else (options.rounds, options.requests)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    with servers.fresh_folder() as folder, serving(folder, cores[0]) as server:
        found = table(measure(server, kinds(server), rounds, requests))
    print(f"{machine()}; {rounds} rounds of {requests} requests of each kind.\n\n{found}")


if __name__ == "__main__":
    main()
