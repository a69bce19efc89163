"""Many nodes behave as one while some of them die: runs of `python -m tests.proof`."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

import pytest
from components import RedisServer, S3Server
from support.depth import LONG, depth

from proof.command import BUILD
from proof.nodes import Nodes, machines_on_s3, workers_on_a_folder
from proof.run import prove

pytestmark = [pytest.mark.process, pytest.mark.long]

SECONDS = depth(3.0, 60.0)
SECONDS_OF_MACHINES = depth(5.0, 90.0)
"""They take longer to start again."""
KINDS = (
    "append 200", "batch 200", "change on a page", "changes 200", "create 200", "delete 200", "download 200",
    "event", "follow 200", "kill", "list 200", "metered 200", "pull 200", "push 200", "replay 401",
    "rows 200", "tail 200", "upload 200",
)  # fmt: skip
RARE_KINDS = (
    "append 401", "append unknown", "download 304", "metered 429", "pull 304", "push 409", "push unknown",
    "replay after a kill",
)  # fmt: skip
"""What does not happen in every run of a few seconds, nor on a machine that is as slow."""
MANY: Final = 5_000
"""Operations of a run in which that happens."""


async def keeps_every_promise(nodes: Nodes, seed: int, *faults: str, seconds: float = SECONDS) -> None:
    BUILD.mkdir(exist_ok=True)
    path = BUILD / f"proof-{seed}.jsonl"
    verdict = await prove(nodes, path, seconds=seconds, seed=seed)
    if verdict.violations:
        pytest.fail(f"seed {seed}, history in {path}\n{verdict}", pytrace=False)
    path.unlink()
    has_many = LONG and verdict.counts.total() - verdict.counts["event"] >= MANY
    for what in (*KINDS, *((*RARE_KINDS, *faults) if has_many else ())):
        assert verdict.counts[what], f"no {what}: {verdict}"


@pytest.mark.timeout(depth(600, 1800))
async def test_four_workers_on_a_folder_behave_as_one(tmp_path: Path) -> None:
    async with workers_on_a_folder(tmp_path) as nodes:
        await keeps_every_promise(nodes, secrets.randbits(32))


@pytest.mark.timeout(depth(600, 1800))
async def test_a_redis_that_forgets_costs_followers_a_reset_and_nothing_else(
    tmp_path: Path, radosgw: S3Server, start_redis: Callable[[], RedisServer]
) -> None:
    seed = secrets.randbits(32)
    async with machines_on_s3(tmp_path, radosgw, start_redis(), Random(seed), forgets=True) as nodes:
        verdict = await prove(nodes, tmp_path / "history", seconds=SECONDS, seed=seed)
    untold = [
        violation for violation in verdict.violations if violation.promise.startswith(("told ", "fed "))
    ]
    assert not untold, f"seed {seed}: {replace(verdict, violations=untold)}"
    assert verdict.counts["loss"] == 1
    assert verdict.counts["reset"] > 0


@pytest.mark.timeout(depth(600, 1800))
async def test_three_machines_on_s3_and_redis_behave_as_one(
    tmp_path: Path, radosgw: S3Server, start_redis: Callable[[], RedisServer]
) -> None:
    seed = secrets.randbits(32)
    async with machines_on_s3(tmp_path, radosgw, start_redis(), Random(seed)) as nodes:
        faults = (f"fault {name}" for name in ("answer", "abort", "delay", "lose_reply", "throttle"))
        await keeps_every_promise(nodes, seed, "stall", *faults, seconds=SECONDS_OF_MACHINES)
