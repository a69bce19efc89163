"""A small service that keeps every promise, and histories of clients who ask it: what the judge must pass.

Each request begins, is served at one moment, and ends, in any order with those of others; requests and
answers are lost, and some requests are served long after their client has left. A `flaw` breaks one promise.
"""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any, Literal

from support import reference_append_log as twin

from proof.documents import hash_of
from proof.files import sha256_of
from proof.history import END, Kind, Operation

Flaw = Literal[
    "",
    "forgets a push",
    "ignores a base",
    "writes and says conflict",
    "pulls what was",
    "forgets an append",
    "appends twice",
    "appends first",
    "tells an old tail",
    "forgets a file",
    "writes a file twice",
    "tears a file",
    "pulls an old file",
    "forgets a nonce",
    "remembers no Idempotency-Key",
    "counts each node apart",
    "feeds not every change",
    "feeds an older version",
    "feeds a change again",
    "forgets its feed",
    "leads back",
]
DOCUMENTS = ("counters/marked", "counters/plain")
LOGS = ("logs/1", "logs/2")
FILES = ("files/1",)
KEYS = dict.fromkeys(("pull", "push"), DOCUMENTS) | dict.fromkeys(("upload", "download"), FILES)
READERS = ("r1", "r2")
PAGE = 2
LIMIT = {"window_ms": 5000, "max_requests": 2}
SETUP = {"limit": LIMIT, "remembers": True}
TICK_MS = 50
NODES = 3


class Service:
    """What is stored, and what the nodes agree on. `serve` is one moment."""

    def __init__(self, random: Random, flaw: Flaw) -> None:
        self._random = random
        self._flaw = flaw
        self._versions: dict[str, list[dict[str, Any]]] = {key: [{}] for key in DOCUMENTS}
        self._logs: dict[str, list[dict[str, Any]]] = {key: [] for key in LOGS}
        self._files: dict[str, list[str]] = {key: [""] for key in FILES}
        self._nonces = set[str]()
        self._done: dict[str, Any] = {}
        self._feed: dict[str, tuple[int, str, int]] = {}
        self._newest = 0
        self._counted: Counter[tuple[int, int]] = Counter()

    def serve(self, request: Operation, now: int) -> tuple[int, Any]:
        """Status and answer at the tick `now`."""
        if request.nonce in self._nonces and not self._errs("forgets a nonce"):
            return 401, None
        self._nonces.add(request.nonce)
        if request.kind == "push":
            return self._push(request, now)
        if request.kind == "pull":
            return self._pull(request)
        if request.kind == "append":
            return 200, self._append(request, now)
        if request.kind == "tail":
            return 200, self._tail(request)
        if request.kind == "upload":
            return 200, self._upload(request, now)
        if request.kind == "download":
            return self._download(request)
        if request.kind == "changes":
            return 200, self._page(request)
        return self._knock(request, now), None

    def _push(self, request: Operation, now: int) -> tuple[int, Any]:
        versions, data = self._versions[request.key], request.sent["data"]
        current = _version(versions[-1])
        if request.sent["base"] != current and not self._errs("ignores a base"):
            done = self._done.get(request.sent.get("once", ""))
            if done is not None and done["hash"] == current:
                return 200, done
            return 409, {"currentHash": current}
        answer = {"hash": _version(data), "timestamp": now * TICK_MS}
        if "once" in request.sent:
            self._done[request.sent["once"]] = answer
        if not self._errs("forgets a push"):
            versions.append(data)
            self._changed(request.key, answer)
        if self._errs("writes and says conflict"):
            return 409, {"currentHash": current}
        return 200, answer

    def _pull(self, request: Operation) -> tuple[int, Any]:
        versions = self._versions[request.key]
        old = request.who != END and self._errs("pulls what was")
        data = versions[max(0, len(versions) - 3)] if old else versions[-1]
        if request.sent.get("known") == _version(data):
            return 304, None
        return 200, {"data": data, "hash": _version(data)}

    def _append(self, request: Operation, now: int) -> Any:
        once = request.sent.get("once")
        if once in self._done and not self._errs("remembers no Idempotency-Key"):
            return self._done[once]
        log = self._logs[request.key]
        ts = max(now * TICK_MS, log[-1]["ts"] + 1 if log else 0)
        element = {"ts": ts, "data": request.sent["data"]}
        answer = {"hash": twin.log_hash(len(log) + 1, element["data"]), "timestamp": ts}
        if not self._errs("forgets an append"):
            log.append(element)
            self._changed(request.key, answer)
        if self._errs("appends twice"):
            log.append(_at(element, ts + 1))
        if len(log) > 2 and self._errs("appends first"):
            one, other = log[-2:]
            log[-2:] = [_at(other, one["ts"]), _at(one, other["ts"])]
        if once is not None:
            self._done[once] = answer
        return answer

    def _tail(self, request: Operation) -> Any:
        log = self._logs[request.key]
        if request.who != END and self._errs("tells an old tail"):
            log = log[:-2]
        since, newest = request.sent.get("checkpoint", -1), request.sent.get("last", len(log))
        within = [element for element in log if element["ts"] > since]
        items = within[max(0, len(within) - newest) :]
        hash_ = twin.log_hash(len(log), log[-1]["data"]) if log else ""
        return {"data": {"items": items} if log else {}, "hash": hash_}

    def _upload(self, request: Operation, now: int) -> Any:
        files, sha256 = self._files[request.key], request.sent["sha256"]
        if not self._errs("forgets a file"):
            files.append(sha256)
        if len(files) > 2 and self._errs("writes a file twice"):
            files.append(files[-2])
        answer = {"hash": sha256, "timestamp": now * TICK_MS}
        self._changed(request.key, answer)
        return answer

    def _download(self, request: Operation) -> tuple[int, Any]:
        files = self._files[request.key]
        old = request.who != END and self._errs("pulls an old file")
        sha256 = files[max(0, len(files) - 3)] if old else files[-1]
        if not sha256:
            return 200, {"hash": ""}
        if request.sent.get("known") == sha256:
            return 304, None
        return 200, {"hash": sha256, "sha256": "torn" if self._errs("tears a file") else sha256}

    def _changed(self, key: str, answer: Any) -> None:
        if self._errs("feeds not every change"):
            return
        self._newest += 1
        before = self._feed.get(key)
        told = before[1] if before and self._errs("feeds an older version") else answer["hash"]
        self._feed[key] = self._newest, told, answer["timestamp"]

    def _page(self, request: Operation) -> Any:
        since = int(request.sent.get("since", "0"))
        if self._errs("forgets its feed"):
            return {"reset": True, "cursor": f"{self._newest:05}"}
        if self._errs("feeds a change again"):
            since = max(0, since - 1)
        newer = sorted((*change, key) for key, change in self._feed.items() if change[0] > since)
        changes = [
            {"collection": key.partition("/")[0], "params": {"id": key.partition("/")[2]}}
            | {"hash": hash_, "timestamp": ms}
            for _, hash_, ms, key in newer[:PAGE]
        ]
        last = newer[PAGE - 1][0] if len(newer) > PAGE else self._newest
        cursor = max(0, last - 5) if self._errs("leads back") else last
        more = {"hasMore": True} if len(newer) > PAGE else {}
        return {"changes": changes, "cursor": f"{cursor:05}", **more}

    def _knock(self, request: Operation, now: int) -> int:
        node = request.node if self._flaw == "counts each node apart" else 0
        window = node, now * TICK_MS // LIMIT["window_ms"]
        self._counted[window] += 1
        return 200 if self._counted[window] <= LIMIT["max_requests"] else 429

    def _errs(self, flaw: Flaw) -> bool:
        return self._flaw == flaw and self._random.random() < 0.3


def _version(data: dict[str, Any]) -> str:
    return hash_of(data) if data else ""


def _at(element: dict[str, Any], ts: int) -> dict[str, Any]:
    return {**element, "ts": ts}


class Clients:
    """Clients who ask a service, one tick of time after another, and their history."""

    def __init__(self, random: Random, flaw: Flaw = "", clients: int = 8) -> None:
        self.history = [Operation(kind="setup", who="run", node=-1, sent=SETUP, start=0.0, end=0.0)]
        self._random = random
        self._service = Service(random, flaw)
        self._now = 0
        self._names = [f"c{n}" for n in range(clients)]
        self._cursors: dict[str, str] = {}
        self._under_way: dict[str, Operation] = {}
        self._left: list[Operation] = []
        self._again: list[Operation] = []
        self._seen: dict[str, dict[str, Any]] = {key: {} for key in DOCUMENTS}
        self._known = ""

    def run(self, ticks: int) -> list[Operation]:
        """So many ticks, and then what is read in the end."""
        for _ in range(ticks):
            self._tick()
        for name in list(self._under_way):
            self._end(name)
        for name in READERS:
            self._read_to_the_end(name)
        for key in DOCUMENTS:
            self._start(END, "pull", key, {})
            self._end(END)
        for key in LOGS:
            self._start(END, "tail", key, {"full": "true"})
            self._end(END)
        for key in FILES:
            self._start(END, "download", key, {})
            self._end(END)
        return self.history

    def _tick(self) -> None:
        self._now += 1
        self._step(self._random.choice(self._names))
        if self._random.random() < 0.3:
            self._step(self._random.choice(READERS))
        if self._left and self._random.random() < 0.05:
            self._service.serve(self._left.pop(self._random.randrange(len(self._left))), self._now)

    def _step(self, name: str) -> None:
        request = self._under_way.get(name)
        if request is None:
            self._begin(name)
        elif request.status is None and self._random.random() < 0.8:
            self._serve(name)
        else:
            self._end(name)

    def _read_to_the_end(self, name: str) -> None:
        more = True
        while more:
            self._start(name, "changes", "", self._since(name))
            self._serve(name)
            answered = self._end(name)
            more = answered.is_unknown or "hasMore" in answered.answer or "reset" in answered.answer

    def _since(self, name: str) -> dict[str, str]:
        return {"since": self._cursors[name]} if name in self._cursors else {}

    def _begin(self, name: str) -> None:
        if name in READERS:
            self._start(name, "changes", "", self._since(name))
            return
        if self._again and self._random.random() < 0.3:
            again = self._random.choice(self._again)
            kind = again.kind if again.is_unknown else "replay"
            self._start(name, kind, again.key, again.sent, "" if again.is_unknown else again.nonce)
            return
        kinds: tuple[Kind, ...] = ("pull", "push", "push", "append", "append", "tail", "metered")
        kind = self._random.choice((*kinds, "upload", "download", "download"))
        new = f"{name}-{self._now}"
        once = {"once": new} if self._random.random() < 0.5 else {}
        key = self._random.choice(KEYS.get(kind, LOGS))
        seen = self._seen.get(key, {})
        marked = {"by": new} if key == "counters/marked" else {}
        bounds = {"checkpoint": self._now * TICK_MS - 300, "last": 2}
        sent: dict[Kind, dict[str, Any]] = {
            "pull": self._random.choice(({}, {"known": _version(seen)} if seen else {})),
            "push": {"data": {"n": seen.get("n", 0) + 1, **marked}, "base": _version(seen), **once},
            "append": {"data": {"id": new}, **once},
            "upload": {"sha256": sha256_of(new, 1), "size": 1},
            "download": self._random.choice(({}, {"known": self._known} if self._known else {})),
            "tail": dict(self._random.sample(sorted(bounds.items()), self._random.randint(1, 2))),
        }
        self._start(name, kind, "metered/1" if kind == "metered" else key, sent.get(kind, {}))
        if kind == "append" and not once and self._random.random() < 0.3:
            self._twice(name)

    def _twice(self, name: str) -> None:
        """Somebody who is idle sends the same bytes at the same time."""
        idle = [other for other in self._names if other not in self._under_way]
        if idle:
            request = self._under_way[name]
            self._start(self._random.choice(idle), request.kind, request.key, request.sent, request.nonce)

    def _start(self, who: str, kind: Kind, key: str, sent: dict[str, Any], nonce: str = "") -> None:
        self._under_way[who] = Operation(
            kind=kind,
            who=who,
            node=self._random.randrange(NODES),
            key=key,
            sent=sent,
            start=self._now,
            end=self._now,
            nonce=nonce or f"{who} {kind} {key} {self._now}",
        )

    def _serve(self, who: str) -> None:
        request = self._under_way[who]
        status, answer = self._service.serve(request, self._now)
        self._under_way[who] = replace(request, status=status, answer=answer)

    def _end(self, who: str) -> Operation:
        """Write down what became of the request, as far as its client knows."""
        request = self._under_way.pop(who)
        self._now += 1
        if who == END:
            status, answer = self._service.serve(request, self._now)
            request = replace(request, status=status, answer=answer)
        elif request.status is None:
            self._left += [request] * (self._random.random() < 0.5)
        elif request.status == 200 and self._random.random() < 0.1:
            request = replace(request, status=self._random.choice((None, 503)), answer=None)
        request = replace(request, end=self._now)
        if request.kind == "metered":
            request = replace(
                request, sent={"from_ms": request.start * TICK_MS, "to_ms": request.end * TICK_MS}
            )
        if request.kind == "pull" and request.status == 200:
            self._seen[request.key] = request.answer["data"]
        if request.kind == "download" and request.status == 200:
            self._known = request.answer["hash"]
        if request.kind == "changes" and request.status == 200:
            self._cursors[who] = request.answer["cursor"]
        answered = not request.is_unknown and request.status != 401
        if request.kind not in ("replay", "metered", "changes") and (answered or "once" in request.sent):
            self._again.append(request)
        self.history.append(request)
        return request
