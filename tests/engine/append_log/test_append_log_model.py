"""Two nodes append to one log while stores fail, nodes crash and clocks move: it is the list it should be."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import reference_append_log as twin
from support.append_log_nodes import repeatable
from support.depth import depth
from support.faulty_store import FaultyStore

from pysync._core import LogHead, decode_append
from pysync.coordinator import IDEMPOTENCY_TTL_MS
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogRange, LogSettings
from pysync.errors import (
    AppendLimitExceeded,
    DocumentCorrupt,
    NonMonotonicTimestamp,
    PysyncError,
    StoreUnavailable,
    TsTooFarAhead,
)
from pysync.model import WriteResult
from pysync.protocol import JSON_TYPE
from pysync.store import ANY, NotModified, Precondition, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

pytestmark = pytest.mark.slow

KEY = "logs/a"
TTL_MS = 2 * IDEMPOTENCY_TTL_MS
HEAD_BYTES = 600
AHEAD_MS = 10_000
"""What the second node's clock is ahead of the first one's."""
REFUSALS = (AppendLimitExceeded, NonMonotonicTimestamp, TsTooFarAhead)


class SharedStore(MemoryStore):
    """Yields to other tasks around each call, and lets no object of a log be given other bytes."""

    def __init__(self, clock: FakeClock, random: Random) -> None:
        super().__init__(clock)
        self._random = random
        self._written: dict[str, bytes] = {}

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        await self._yield()
        found = await super().get(key, if_none_match)
        await self._yield()
        return found

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        if key.startswith("_pysync/"):
            assert self._written.setdefault(key, body) == body, f"{key} was rewritten"
        await self._yield()
        etag = await super().put(key, body, content_type, expect)
        await self._yield()
        return etag

    async def _yield(self) -> None:
        for _ in range(self._random.randrange(3)):
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Fault:
    kind: str
    verb: Any
    after: int


class Node:
    """One node, on its own way to the shared store."""

    def __init__(self, machine: "LogMachine", ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms
        self.clock: Callable[[], int] = lambda: machine.clock() + ahead_ms
        self.store = FaultyStore(machine.shared)
        self.logs = AppendLogs(self.store, machine.coordinator, self.clock, head_bytes=HEAD_BYTES)

    def meet(self, fault: Fault) -> None:
        match fault.kind:
            case "crash":
                self.store.crash(fault.after, done=False)
            case "crash done":
                self.store.crash(fault.after, done=True)
            case "fail":
                self.store.fail(fault.verb, after=fault.after)
            case "lose reply":
                self.store.lose_reply(fault.verb, after=fault.after)


nodes = st.integers(0, 1)
sizes = st.sampled_from([0, 0, 40, 120, 700])
"""Of the padding: several elements share a tail, or one is more than it may hold."""
steps = st.sampled_from([None, None, None, None, 1, 5, 0, -2, 300_000, 300_001])
wants = st.lists(st.tuples(sizes, steps), min_size=1, max_size=6)
failures = st.builds(
    Fault, st.sampled_from(["fail", "lose reply"]), st.sampled_from(["put", "put", "get", "delete"]),
    st.integers(0, 3),
)  # fmt: skip
crashes = st.builds(Fault, st.sampled_from(["crash", "crash done"]), st.none(), st.integers(0, 4))
counts = st.none() | st.integers(0, 12) | st.integers(0, 400)
newest_or_oldest = st.tuples(counts, st.none()) | st.tuples(st.none(), counts)


class LogMachine(RuleBasedStateMachine):
    """`elements` is what the log must hold: what was acknowledged, and what turned out to be there."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.coordinator = MemoryCoordinator(self.clock)
        self.elements: tuple[twin.Element, ...] = ()
        self.made = 0
        self.keys: dict[str, tuple[int, twin.Element, WriteResult | None]] = {}
        """Idempotency-Keys: when they were used first, for what, and what came of it."""

    @initialize(
        seed=st.integers(0, 2**32),
        ttl=st.booleans(),
        start=st.sampled_from(["nothing", "document", "chunks", 17, 280]),
    )
    def begin(self, seed: int, ttl: bool, start: str | int) -> None:
        """Start on an empty key, on a log that Starfish wrote, or on one of ours with that many segments."""
        self.random = Random(seed)
        self.shared = SharedStore(self.clock, self.random)
        self.said = LogSettings(ttl_ms=TTL_MS if ttl else None)
        self.nodes = [Node(self, 0), Node(self, AHEAD_MS)]
        if isinstance(start, int):
            for element in self.make([(HEAD_BYTES, None)] * start, 0):
                self.runner.run(self.nodes[0].logs.append(KEY, decode_append(element.body), self.said))
            self.elements = self.stored()
        elif start != "nothing":
            steps = range(self.random.randrange(1, 30))
            self.elements = tuple(self.make([(0, step) for step in steps], self.clock.now_ms - 100))
            log = twin.Log(self.elements)
            stored: dict[str, Any] = {KEY: twin.starfish_document(log)}
            if start == "chunks":
                stored = twin.starfish_chunks(log, KEY, 7, behind=self.random.randrange(min(2, log.count)))
            for key, value in stored.items():
                self.runner.run(self.shared.put(key, json.dumps(value).encode()))

    def teardown(self) -> None:
        for node in getattr(self, "segments", ()):
            self.runner.run(node.logs.close())
        self.runner.close()

    # What happens.

    @rule(node=nodes, wants=wants, room=st.none() | st.none() | st.integers(0, 4))
    def append_in_one_group(self, node: int, wants: Any, room: int | None) -> None:
        rules = self.said if room is None else self.limited(room)
        wanted = self.make(wants, self.last_ms)
        log = twin.Log(self.elements)
        _, expected = log.append(wanted, self.nodes[node].clock(), rules.max_items)
        results = self.append([(node, element) for element in wanted], rules)
        outcomes = [
            outcome.code if isinstance(outcome, PysyncError) else (outcome.hash, outcome.timestamp_ms)
            for outcome in results
        ]
        assert outcomes == expected

    @rule(ones=wants, others=wants)
    def append_through_both(self, ones: Any, others: Any) -> None:
        made = self.make([*ones, *others], self.last_ms)
        results = self.append([(n >= len(ones), element) for n, element in enumerate(made)], self.said)
        assert not any(isinstance(outcome, StoreUnavailable) for outcome in results)

    @rule(ones=wants, others=wants, faults=st.lists(st.tuples(nodes, failures), min_size=1, max_size=3))
    def append_while_a_store_fails(self, ones: Any, others: Any, faults: Any) -> None:
        made = self.make([*ones, *others], self.last_ms)
        for node, fault in faults:
            self.nodes[node].meet(fault)
        self.append([(n >= len(ones), element) for n, element in enumerate(made)], self.said)
        self.recover()

    @rule(node=nodes, ones=wants, others=st.just([]) | wants, fault=crashes)
    def crash_while_appending(self, node: int, ones: Any, others: Any, fault: Fault) -> None:
        made = self.make([*ones, *others], self.last_ms)
        self.nodes[node].meet(fault)
        self.append([(node if n < len(ones) else not node, e) for n, e in enumerate(made)], self.said)
        self.restart(node)
        for survivor in (node, 1 - node):
            [element] = self.make([(0, None)], 0)
            [results] = self.append([(survivor, element)], self.said)
            assert isinstance(results, WriteResult)

    @rule(
        node=nodes,
        name=st.sampled_from("abc"),
        size=sizes,
        fault=st.none() | st.none() | st.tuples(nodes, failures | crashes),
        at_once=st.booleans(),
    )
    def append_once(self, node: int, name: str, size: int, fault: Any, at_once: bool) -> None:
        if name in self.keys and self.keys[name][0] + IDEMPOTENCY_TTL_MS <= self.clock.now_ms:
            # The claim is of this attempt or a later one.
            self.advance(IDEMPOTENCY_TTL_MS)
            del self.keys[name]
        if name not in self.keys:
            self.keys[name] = self.clock.now_ms, self.make([(size, None)], 0)[0], None
        if fault is not None:
            self.nodes[fault[0]].meet(fault[1])
        since_ms, element, known = self.keys[name]
        results = self.append([(node, element), (1 - node, element)][: 1 + at_once], self.said, name)
        self.recover()
        if fault is not None and fault[1].kind.startswith("crash"):
            self.restart(fault[0])
        answers = [outcome for outcome in results if isinstance(outcome, WriteResult)]
        if known is not None:
            answers.append(known)
        if answers:
            assert answers == answers[:1] * len(answers)
            self.keys[name] = since_ms, element, answers[0]

    @rule(node=nodes, name=st.sampled_from("abc"))
    def repeat_until_answered(self, node: int, name: str) -> None:
        known = self.keys.get(name)
        assume(known is not None)
        assert known is not None
        since_ms, element, answer = known
        assume(since_ms + IDEMPOTENCY_TTL_MS > self.clock.now_ms + 10_000)
        [results] = self.append([(node, element)], self.said, name)
        if isinstance(results, StoreUnavailable):
            self.advance(10_000)
            [results] = self.append([(node, element)], self.said, name)
        assert isinstance(results, WriteResult)
        assert answer in (None, results)
        self.keys[name] = since_ms, element, results

    @rule(node=nodes)
    def restart(self, node: int) -> None:
        self.runner.run(self.nodes[node].logs.close())
        self.nodes[node] = Node(self, self.nodes[node].ahead_ms)

    @rule(
        later_ms=st.sampled_from([1, 50, 8_000, 100_000, IDEMPOTENCY_TTL_MS, TTL_MS - AHEAD_MS, TTL_MS + 1])
    )
    def advance(self, later_ms: int) -> None:
        self.clock.now_ms += later_ms
        if self.said.ttl_ms is None:
            return
        found = self.runner.run(self.shared.get(KEY))
        if isinstance(found, StoredObject):
            expires_ms = LogHead.read(found.body, "items").written_ms + self.said.ttl_ms
            if expires_ms < self.clock.now_ms + AHEAD_MS:
                # For one node at least: then for both.
                self.clock.now_ms = max(self.clock.now_ms, expires_ms + 1)
                self.elements = ()

    @precondition(lambda self: self.said.ttl_ms is not None)
    @rule(node=nodes, fault=st.none() | failures | crashes)
    def sweep(self, node: int, fault: Fault | None) -> None:
        if fault is not None:
            self.nodes[node].meet(fault)
        try:
            self.runner.run(self._sweep(self.nodes[node]))
        except StoreUnavailable:
            assert fault is not None
        self.recover()
        if fault is not None and fault.kind.startswith("crash"):
            self.restart(node)

    async def _sweep(self, node: Node) -> None:
        async for listed in node.store.walk("logs"):
            if listed.key == KEY:
                await node.logs.delete_expired(listed, self.said)

    @rule(node=nodes, since=st.floats(0, 1), bounds=newest_or_oldest)
    def read(self, node: int, since: float, bounds: tuple[int | None, int | None]) -> None:
        log = twin.Log(self.elements)
        after_ms = None
        if since > 0.1:
            first = self.elements[0].ts_ms if self.elements else 0
            after_ms = int((first or 0) - 1 + (since - 0.1) / 0.9 * (log.ts_ms + 2 - (first or 0)))
        wanted = LogRange(max(0, after_ms) if after_ms is not None else None, *bounds)
        hash_, elements = self.runner.run(self.read_text(self.nodes[node].logs, wanted, self.said))
        assert elements == log.within(wanted.since, *bounds)
        assert hash_ == log.hash

    @rule(node=nodes, fault=failures | st.just(Fault("tear", "get", 0)))
    def read_while_the_store_fails(self, node: int, fault: Fault) -> None:
        if fault.kind == "tear":
            self.nodes[node].store.truncate_next_get()
        self.nodes[node].meet(fault)
        try:
            _, elements = self.runner.run(self.read_text(self.nodes[node].logs, LogRange(), self.said))
        except (StoreUnavailable, DocumentCorrupt):
            return
        finally:
            self.recover()
        assert elements == twin.Log(self.elements).within()

    @invariant()
    def the_log_is_what_was_acknowledged(self) -> None:
        if hasattr(self, "segments"):
            assert self.stored() == self.elements
            times = [element["ts"] for element in twin.Log(self.elements).within()]
            assert times == sorted(set(times))

    # What that means.

    @property
    def last_ms(self) -> int:
        return max(twin.Log(self.elements).ts_ms, self.clock.now_ms)

    def make(self, wants: Sequence[tuple[int, int | None]], base_ms: int) -> list[twin.Element]:
        """Elements that no other is like. A time is told by its distance from the base."""
        made = []
        for size, step in wants:
            self.made += 1
            ts_ms = None if step is None else max(0, base_ms + step)
            made.append(twin.Element(ts_ms, {"n": self.made, "pad": "x" * size}))
        return made

    def limited(self, room: int) -> LogSettings:
        return LogSettings(max_items=len(self.elements) + room, ttl_ms=self.said.ttl_ms)

    def append(
        self, wanted: Sequence[tuple[int, twin.Element]], rules: LogSettings, request_key: str | None = None
    ) -> list[WriteResult | PysyncError]:
        """Append through the nodes, all at once; what each was told, once the log has proved to hold it."""

        async def one(node: int, element: twin.Element) -> WriteResult:
            logs, body = self.nodes[node].logs, decode_append(element.body)
            request = None if request_key is None else repeatable(request_key, body)
            return await logs.append(KEY, body, rules, request=request)

        async def all_() -> list[Any]:
            return await asyncio.gather(*(one(*each) for each in wanted), return_exceptions=True)

        results: list[WriteResult | PysyncError] = self.runner.run(all_())
        before = self.elements
        stored = self.stored()
        assert stored[: len(before)] == before
        for outcome in results:
            assert isinstance(outcome, (WriteResult, StoreUnavailable, *REFUSALS)), repr(outcome)
        added = [element.data["n"] for element in stored[len(before) :]]
        assert len(added) == len(set(added))
        assert set(added) <= {element.data["n"] for _, element in wanted}
        by_number = {element.data["n"]: (at, element) for at, element in enumerate(stored)}
        for (_, element), outcome in zip(wanted, results, strict=True):
            if isinstance(outcome, WriteResult):
                at, found = by_number[element.data["n"]]
                assert outcome == WriteResult(twin.log_hash(at + 1, found.data), found.ts_ms or 0)
                assert element.ts_ms in (None, found.ts_ms)
            elif isinstance(outcome, REFUSALS):
                assert element.data["n"] not in by_number
        for node in (0, 1):
            order = [
                by_number[element.data["n"]][0]
                for (through, element), outcome in zip(wanted, results, strict=True)
                if through == node and isinstance(outcome, WriteResult)
            ]
            assert order == sorted(order)
        self.elements = stored
        return results

    def stored(self) -> tuple[twin.Element, ...]:
        """What a node that has never seen the log reads of it."""
        logs = AppendLogs(self.shared, self.coordinator, self.clock)
        hash_, elements = self.runner.run(self.read_text(logs, LogRange(), self.said))
        found = tuple(twin.Element(element["ts"], element["data"]) for element in elements)
        assert hash_ == twin.Log(found).hash
        return found

    async def read_text(
        self, logs: AppendLogs, bounds: LogRange, rules: LogSettings
    ) -> tuple[str, list[Any]]:
        tail = await logs.read(KEY, bounds, rules)
        if bounds.oldest is None and self.random.random() < 0.5:
            text = b"".join([chunk async for chunk in tail.chunks()])
        else:
            text = await tail.text()
        elements: list[Any] = json.loads(b"[%b]" % text)
        return tail.hash, elements

    def recover(self) -> None:
        for node in self.nodes:
            node.store.reset()


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=depth(20, 240), stateful_step_count=30, deadline=None)
