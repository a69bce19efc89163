"""After a disaster a restore gives back everything that is older than the recovery point."""

import secrets
from pathlib import Path

import pytest
from support.depth import LONG

from proof.drill import as_of, drill
from proof.history import Operation

pytestmark = [pytest.mark.process, pytest.mark.long]

SEEDS = [*range(200)] if LONG else [None]
"""None is another one in each run."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_restore_has_everything_that_is_older_than_the_recovery_point(
    seed: int | None, tmp_path: Path
) -> None:
    seed = secrets.randbits(32) if seed is None else seed
    verdict = await drill(tmp_path, seconds=6.0, seed=seed)
    if verdict.violations:
        pytest.fail(f"seed {seed}\n{verdict}", pytrace=False)
    for what in ("append 200", "pull 200", "push 200", "tail 200"):
        assert verdict.counts[what], f"no {what}: {verdict}"


def test_write_acknowledged_after_the_moment_may_be_missing() -> None:
    push = Operation(kind="push", who="c", node=0, key="a", start=9.0, end=10.0, status=200)
    assert as_of(push, 10.0) == push
    later = as_of(push, 9.5)
    assert later is not None
    assert later.is_unknown
    pull = Operation(kind="pull", who="c", node=0, key="a", start=9.0, end=10.0, status=200)
    assert as_of(pull, 10.0) == pull
    assert as_of(pull, 9.5) is None
