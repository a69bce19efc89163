"""Who asks a server while it is overloaded: good clients, health probes, and those who ask for too much.

Each function of `PARTS` makes the actors of one process of the generator; `generate` is that process.
Requests are made before the clock starts, and signed for the moment in which they are due.
"""

import base64
import gc
import itertools
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final
from urllib.parse import quote, urlencode

import orjson

from benches.holders import Holders
from benches.open_loop import Actor, Address, OpenLoop, Poller, Reading, Sent, Timeline
from benches.workloads import big_document, note, push_body
from pysync.auth import issuing, signing
from pysync.auth.certificates import SCHEME
from pysync.auth.identity_keys import IdentityKeys
from pysync.protocol import JSON_TYPE

GOOD: Final = tuple(f"127.0.1.{n}" for n in range(1, 33))
CROWD: Final = tuple(f"127.0.2.{n}" for n in range(1, 65))
ATTACKERS: Final = tuple(f"127.0.0.{n}" for n in range(2, 6))
PROXY: Final = ("127.0.0.1",)
"""Addresses: of good clients, of as many others that are good, of attackers, and of a proxy before all."""
GOOD_RATE: Final = 0.5
GOOD_MOST: Final = 6_400
CROWD_MOST, CROWD_DEPTH = 1_024, 64
PROXY_MOST: Final = 2_000
"""Connections of good clients, who have one request under way on each; of a crowd; and of a proxy."""
HEALTH_S, HEALTH_LIMIT_S = 0.1, 5.0
LIMIT_S: Final = 2.0
EVENTS_PER_S: Final = 20
MEMORY: Final = 1_000_000_000
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
class Plan:
    """What a process of the generator does. `start` is a time of `time.perf_counter`, which all processes
    share; the attack begins `calm_s` after it and lasts `seconds`, then the good clients go on for
    `recover_s`. `rate` is the requests a second that the server answers at most, `amount` how much of the
    attack, and `lead_s` how long before it those connections are opened that are to be there when it begins.
    `places` are those in the change log from which streams resume."""

    server: Address
    admin: Address | None
    good: Sequence[Identity]
    crowd: Sequence[Identity]
    rate: float
    amount: float
    start: float
    calm_s: float
    seconds: float
    recover_s: float
    lead_s: float
    core: int
    places: Sequence[str] = ()

    @property
    def attack_at(self) -> float:
        return self.start + self.calm_s

    @property
    def wall_s(self) -> float:
        """The wall clock at `start`."""
        return time.time() - time.perf_counter() + self.start

    @property
    def all_s(self) -> float:
        return self.calm_s + self.seconds + self.recover_s


@dataclass(frozen=True, slots=True)
class Report:
    """What a process did: its timelines by name, what attackers were answered, and its share of a core while
    it ran."""

    sent: dict[str, Sent]
    tally: dict[str, int]
    busy: float


Part = Callable[[Plan, Poller], dict[str, Actor]]


def _pulls(plan: Plan, who: Sequence[Identity], rate: float, first_s: float, seconds: float) -> Timeline:
    """Signed pulls at a rate, each by the next of those identities."""
    wall_s, server = plan.wall_s + first_s, plan.server
    pulls = [who[n % len(who)].pull(server, wall_s + n / rate) for n in range(int(seconds * rate))]
    return Timeline.evenly(pulls, rate, first_s=first_s)


def _health(plan: Plan, poller: Poller) -> dict[str, Actor]:
    found: dict[str, Actor] = {}
    for name, address in (("health", plan.server), ("admin", plan.admin)):
        if address is not None:
            asked = [request("GET", "/health", address)] * int(plan.all_s / HEALTH_S)
            found[name] = OpenLoop(
                poller, address, PROXY, Timeline.evenly(asked, 1 / HEALTH_S), plan.start,
                most=1_000, limit_s=HEALTH_LIMIT_S, fresh=True,
            )  # fmt: skip
    return found


def _good(plan: Plan, poller: Poller) -> dict[str, Actor]:
    timeline = _pulls(plan, plan.good, GOOD_RATE * plan.rate, 0.0, plan.all_s)
    good = OpenLoop(poller, plan.server, GOOD, timeline, plan.start, most=GOOD_MOST, limit_s=LIMIT_S)
    return {"good": good, **_health(plan, poller)}


def _crowd(plan: Plan, poller: Poller) -> dict[str, Actor]:
    """As many more good clients as it takes to ask `amount` times what the server answers."""
    rate = (plan.amount - GOOD_RATE) * plan.rate
    return _flood(plan, poller, CROWD, _pulls(plan, plan.crowd, rate, plan.calm_s, plan.seconds))


def _flood(plan: Plan, poller: Poller, sources: Sequence[str], timeline: Timeline) -> dict[str, Actor]:
    flood = OpenLoop(
        poller, plan.server, sources, timeline, plan.start,
        most=CROWD_MOST, depth=CROWD_DEPTH, limit_s=LIMIT_S,
    )  # fmt: skip
    return {"flood": flood}


def _credentials(authorization: str, at_s: float) -> dict[str, str]:
    """Credentials of the right form, whose signature is none."""
    return {
        "Authorization": authorization,
        "X-Starfish-Sig": base64.b64encode(os.urandom(64)).decode(),
        "X-Starfish-Ts": str(int(at_s * 1000)),
        "X-Starfish-Nonce": base64.b64encode(os.urandom(16)).decode(),
    }


def _junk_requests(plan: Plan, headers: str = "") -> Iterator[bytes]:
    """What scanners send: without credentials, with some that mean nothing, for nothing that there is, and
    one of twenty is not HTTP."""
    for number in itertools.count():
        if number % 20 == 19:
            yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64) + b"\r\n\r\n"
        elif number % 3 == 0:
            yield request("GET", ELSEWHERE, plan.server, headers=headers)
        elif number % 3 == 1:
            nonsense = SCHEME + base64.b64encode(os.urandom(450)).decode()
            members = _credentials(nonsense, plan.wall_s + plan.calm_s)
            yield request("GET", ELSEWHERE, plan.server, members, headers)
        else:
            yield request("GET", f"/{os.urandom(6).hex()}/wp-login.php", plan.server, headers=headers)


def _junk_timeline(plan: Plan, headers: str = "") -> Timeline:
    rate = plan.amount * plan.rate
    made = list(itertools.islice(_junk_requests(plan, headers), 2_000))
    junk = list(itertools.islice(itertools.cycle(made), int(plan.seconds * rate)))
    return Timeline.evenly(junk, rate, first_s=plan.calm_s, kind=1)


def _junk(plan: Plan, poller: Poller) -> dict[str, Actor]:
    return _flood(plan, poller, ATTACKERS, _junk_timeline(plan))


def _forged(plan: Plan, poller: Poller) -> dict[str, Actor]:
    """Certificates that nobody signed, no two alike."""
    rate, text, wall_s = plan.amount * plan.rate, Identity().text, plan.wall_s + plan.calm_s
    expiry = orjson.loads(text)["exp"]
    forged = []
    for number in range(int(plan.seconds * rate)):
        changed = text.replace(b"%d" % expiry, b"%d" % (expiry + 1 + number))
        members = _credentials(SCHEME + base64.b64encode(changed).decode(), wall_s + number / rate)
        forged.append(request("GET", ELSEWHERE, plan.server, members))
    return _flood(plan, poller, ATTACKERS, Timeline.evenly(forged, rate, first_s=plan.calm_s, kind=1))


def _proxied(plan: Plan, poller: Poller) -> dict[str, Actor]:
    """Good clients and junk through the connections of one proxy, which tells who they are."""
    rate, wall_s = GOOD_RATE * plan.rate, plan.wall_s
    pulls = []
    for n in range(int(plan.all_s * rate)):
        number = n % len(plan.good)
        header = f"X-Forwarded-For: 198.51.100.{number + 1}\r\n"
        pulls.append(plan.good[number].pull(plan.server, wall_s + n / rate, header))
    timeline = Timeline.evenly(pulls, rate).merged(_junk_timeline(plan, "X-Forwarded-For: 203.0.113.7\r\n"))
    both = OpenLoop(poller, plan.server, PROXY, timeline, plan.start, most=PROXY_MOST, limit_s=LIMIT_S)
    return {"good": both}


def _readers(plan: Plan, poller: Poller) -> dict[str, Actor]:
    asked = (request("GET", "/pull/big/megabyte", plan.server),)
    return _held(plan, poller, lambda _: asked, reading=Reading.NEVER, spread_s=plan.seconds / 4)


def _bodies(plan: Plan, poller: Poller) -> dict[str, Actor]:
    body, numbers, tag = large_body(), itertools.count(), os.urandom(4).hex()
    length = f"Content-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}\r\n"

    def pieces(_: int) -> tuple[bytes, ...]:
        path = f"/push/big/{tag}-{next(numbers)}"
        return request("POST", path, plan.server, headers=length), body

    return _held(plan, poller, pieces)


def _batches(plan: Plan, poller: Poller) -> dict[str, Actor]:
    asked = (request("GET", LARGEST_BATCH, plan.server),)
    return _held(plan, poller, lambda _: asked)


def _idle(plan: Plan, poller: Poller) -> dict[str, Actor]:
    return _held(plan, poller, lambda _: (), spread_s=plan.seconds / 8)


def _slow(plan: Plan, poller: Poller) -> dict[str, Actor]:
    length = f"Content-Type: {JSON_TYPE}\r\nContent-Length: 60000\r\n"

    def pieces(number: int) -> tuple[bytes, ...]:
        return request("POST", f"/push/notes/slow-{number}", plan.server, headers=length), b"{"

    return _held(plan, poller, pieces, spread_s=plan.seconds / 8, trickle_s=2.0)


def _streams(plan: Plan, poller: Poller) -> dict[str, Actor]:
    asked = (request("GET", "/events?collections=notes", plan.server),)
    pushes = [
        request("POST", f"/push/notes/event-{n}", plan.server, body=push_body(note(f"event-{n}")))
        for n in range(int(EVENTS_PER_S * plan.seconds))
    ]
    timeline = Timeline.evenly(pushes, EVENTS_PER_S, first_s=plan.calm_s)
    writer = OpenLoop(poller, plan.server, PROXY, timeline, plan.start, most=32, limit_s=LIMIT_S)
    held = _held(plan, poller, lambda _: asked, reading=Reading.DISCARD, spread_s=plan.lead_s * 0.8)
    return {"events": writer, **held}


def _resumes(plan: Plan, poller: Poller) -> dict[str, Actor]:
    """Half of them want all that happened, half want a document that nobody wrote."""
    target = f"/events?collections=notes&lastEventId={plan.places[0]}"
    only = "&params=" + quote(orjson.dumps({"notes": {"id": "nobody"}}))
    asked = [(request("GET", target + end, plan.server),) for end in ("", only)]
    return _held(plan, poller, lambda number: asked[number % 2], reading=Reading.DISCARD)


def _held(
    plan: Plan,
    poller: Poller,
    pieces: Callable[[int], tuple[bytes, ...]],
    *,
    reading: Reading = Reading.ANSWERS,
    spread_s: float = 0.0,
    trickle_s: float = 0.0,
) -> dict[str, Actor]:
    start = plan.attack_at - plan.lead_s
    held = Holders(
        poller, plan.server, ATTACKERS, int(plan.amount), pieces, start,
        reading=reading, spread_s=spread_s, trickle_s=trickle_s,
    )  # fmt: skip
    return {"held": held}


PARTS: Final[dict[str, Part]] = {
    "good": _good,
    "health": _health,
    "crowd": _crowd,
    "junk": _junk,
    "forged": _forged,
    "proxied": _proxied,
    "readers": _readers,
    "bodies": _bodies,
    "batches": _batches,
    "idle": _idle,
    "slow": _slow,
    "streams": _streams,
    "resumes": _resumes,
}


def large_body() -> bytes:
    """A push of 4.9 MB of JSON: nested records."""
    record = big_document(0)
    return push_body(b'{"parts":[' + b",".join([record] * (4_900_000 // len(record))) + b"]}")


def stored(plan: Plan) -> Iterator[bytes]:
    """Pushes of the documents that the others read."""
    for who in (*plan.good, *plan.crowd):
        yield who.push(plan.server, time.time())
    text = random.Random(0).randbytes(500_000).hex().encode()
    yield request("POST", "/push/big/megabyte", plan.server, body=push_body(b'{"text":"%b"}' % text))
    yield request("POST", "/push/big/largest", plan.server, body=large_body())


def generate(part: str, plan: Plan, parent: Connection) -> None:
    """Make the actors of a part, tell the parent, run them, and send a `Report`."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.disable()
    poller = Poller()
    try:
        actors = PARTS[part](plan, poller)
    except MemoryError:
        sys.exit(f"{part}: its requests take more than {MEMORY / 1e9:g} GB; try fewer --seconds")
    os.sched_setaffinity(0, {plan.core})
    parent.send("ready")
    is_attack = part not in ("good", "health")
    if is_attack:
        os.nice(5)  # or those who measure would wait for it
    time.sleep(max(0.0, plan.start - 0.02 - time.perf_counter()))
    # What is left of good clients goes on after the attack, through a proxy too.
    ends = plan.attack_at + plan.seconds if is_attack and part != "proxied" else plan.start + plan.all_s
    began, used = time.perf_counter(), time.process_time()
    poller.run(list(actors.values()), ends)
    busy = (time.process_time() - used) / (time.perf_counter() - began)
    sent = {name: actor.result() for name, actor in actors.items() if isinstance(actor, OpenLoop)}
    tally: Counter[str] = Counter()
    for actor in actors.values():
        if isinstance(actor, Holders):
            tally += actor.tally
    for name in ("flood", "events"):
        if name in sent:
            tally.update(str(status) if status else "none" for status in sent[name].statuses)
    parent.send(Report(sent, dict(tally), busy))
    parent.close()
