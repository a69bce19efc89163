"""One run: clients ask while nodes die, and what they heard is judged."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from proof.history import History, Kind, Operation
from proof.judge import judge
from proof.nodes import Nodes
from proof.service import LIMIT
from proof.verdict import Verdict
from proof.workload import load, read_all


async def prove(nodes: Nodes, path: Path, *, seconds: float, seed: int) -> Verdict:
    """Load `nodes` for so many seconds while some of them are killed, keep the history in the file `path`,
    and judge it. `seed` decides what is asked and killed, not how it overlaps."""
    random = Random(seed)
    with History(path) as history:
        history.add(_event("setup", {"seed": seed, "limit": LIMIT}))
        async with asyncio.TaskGroup() as group:
            group.create_task(load(nodes.servers, history, random, seconds))
            group.create_task(_disturb(nodes, history, random, seconds))
        await read_all(nodes.servers, history, random)
        history.add(_event("faults", dict(nodes.faults())))
    return await asyncio.to_thread(judge, path)


async def _disturb(nodes: Nodes, history: History, random: Random, seconds: float) -> None:
    """Have befall the nodes what does, so that they serve for as long before each and after the last."""
    begun = time.monotonic()
    disturbances = nodes.disturbances()
    for at, disturb in enumerate(disturbances, start=1):
        await asyncio.sleep(begun + seconds * at / (len(disturbances) + 1) - time.monotonic())
        start = time.monotonic()
        kind, node = await disturb(random)
        history.add(replace(_event(kind, {}), node=node, start=start))


def _event(kind: Kind, sent: dict[str, Any]) -> Operation:
    now = time.monotonic()
    return Operation(kind=kind, who="run", node=-1, sent=sent, start=now, end=now)
