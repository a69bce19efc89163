"""Append-only logs in the core."""

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import pysync._core as core
from support import reference_append_log as twin

NOW_MS = 1_700_000_000_000


@dataclass
class Kept:
    """A log as a store keeps it: its head, and by name the objects that its head stands on."""

    head: core.LogHead = field(default_factory=lambda: core.LogHead("0a1b"))
    objects: dict[str, bytes] = field(default_factory=dict)

    def append(
        self, wanted: list[twin.Element], now_ms: int, max_count: int | None, write_ids: list[str]
    ) -> list[twin.Outcome]:
        bodies = [core.decode_append(element.body) for element in wanted]
        self.head, outcomes = self.head.append(list(zip(bodies, write_ids, strict=True)), now_ms, max_count)
        return outcomes

    def seal(self, max_bytes: int) -> None:
        self.head, made = self.head.seal(max_bytes)
        for name, body in made:
            assert self.objects.setdefault(name, body) == body, "a name was given to other bytes"
        assert self.head.tail_count == 0

    def reread(self) -> None:
        stored = self.head.stored()
        said = json.loads(stored)
        short = [*said.get("marks", []), *itertools.chain(*said.get("index", []))]
        slack = 300 + 24 * len(short)  # each may be shorter than the 28 bytes that it counts
        assert len(stored) <= self.head.size < len(stored) + slack
        self.head = core.LogHead.read(stored, "items")
        assert self.head.stored() == stored

    def segments(self, *bounds: int | None) -> list[tuple[core.LogNode, bytes]]:
        """The segments that are to be read for the elements within bounds."""
        nodes, found = self.head.nodes(*bounds)[::-1], []
        while nodes:
            node = nodes.pop()
            if node.level:
                nodes += self.head.expand(self.objects[node.name], node, *bounds)[::-1]
            else:
                found.append((node, self.objects[node.name]))
        return found

    def read(self, *bounds: int | None) -> list[Any]:
        return parsed(self.head.slice(self.segments(*bounds), True, *bounds))


def parsed(text: bytes) -> list[Any]:
    elements: list[Any] = json.loads(b"[%b]" % text)
    return elements


DATA: list[dict[str, Any]] = [
    {}, {"n": 1}, {"text": 'line\nbreak "quoted", é\u2028'}, {"nested": [{"a": [1, None]}, "},\n{"]},
    {"big": [2**53 + 1, -(2**63), 2**64 - 1]}, {"float": [1.5, 1e300, 5e-324]}, {"long": "x" * 300},
    {"items": [{"ts": 1, "data": {}}]},
]  # fmt: skip
PROOFS = [None, ("aa" * 32, "sig"), ('k"ey\n', "é")]
