"""One run: clients send requests and others read what changes while nodes die, and the judge examines the
history."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

from proof.follower import FOLLOWERS, Follower
from proof.history import History, Kind, Operation
from proof.judge import judge
from proof.nodes import Nodes
from proof.reader import READERS, Reader
from proof.service import JUDGED_LIMIT
from proof.verdict import Verdict
from proof.workload import LAST, load, push_last, read_all

END_LIMIT_S: Final = 300.0
"""For followers to be told what is there in the end. Passes only if they miss something."""


async def prove(nodes: Nodes, path: Path, *, seconds: float, seed: int) -> Verdict:
    """Load `nodes` for so many seconds while some of them are killed, keep the history in the file `path`,
    and judge it. `seed` decides what is asked and killed, not how it overlaps."""
    random = Random(seed)
    with History(path) as history:
        kept = {"is_ordered": nodes.is_ordered, "remembers": nodes.remembers}
        history.add(_event("setup", {"seed": seed, "limit": JUDGED_LIMIT, **kept}))
        readers = [Reader(f"r{n}", nodes.servers, history, Random(random.random())) for n in range(READERS)]
        followers = [
            Follower(f"f{n}", nodes.servers, history, Random(random.random())) for n in range(FOLLOWERS)
        ]
        async with _running([*readers, *followers]):
            async with asyncio.TaskGroup() as group:
                group.create_task(load(nodes.servers, history, random, seconds))
                group.create_task(_disturb(nodes, history, random, seconds))
            await nodes.flush()
            last = await push_last(nodes.servers, history, random)
            with suppress(TimeoutError):  # what they miss the judge tells
                async with asyncio.timeout(END_LIMIT_S):
                    await asyncio.gather(*(follower.has_seen(LAST, last) for follower in followers))
        for reader in readers:
            await reader.read_to_the_end()
        await read_all(nodes.servers, history, random)
        history.add(_event("faults", dict(nodes.faults())))
    return await asyncio.to_thread(judge, path)


@asynccontextmanager
async def _running(followers: list[Follower]) -> AsyncIterator[None]:
    """Followers and readers, who are there from the beginning."""
    running = [asyncio.create_task(follower.run()) for follower in followers]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


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
