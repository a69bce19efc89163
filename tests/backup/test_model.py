"""Makers, pruners and verifiers that are killed or suspended anywhere leave every snapshot whole."""

import asyncio
import os
from random import Random

import pytest
from support.backup_model import InlineExecutor, Model
from support.depth import depth

from pysync.backup import format as backup_format
from pysync.backup import make, pack, snapshot

pytestmark = [pytest.mark.slow, pytest.mark.long]

SMALL = (
    (pack, "PACK_BYTES", 4000),
    (pack, "PAGE_BYTES", 6000),
    (backup_format, "PAGE_BYTES", 6000),
    (snapshot, "MAX_LISTS", 4),
    (snapshot, "MAX_CHANGES", 20),
    (make, "CHECKPOINT_ENTRIES", 8),
)
"""Limits that a few small objects reach."""


@pytest.mark.parametrize("seed", range(depth(10, 500)))
async def test_every_snapshot_restores_the_store_of_its_moment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a failed seed again with PYTHONHASHSEED=0 and others until it fails: it orders sets of names."""
    asyncio.get_running_loop().set_default_executor(InlineExecutor())
    monkeypatch.setattr(os, "urandom", Random(seed).randbytes)
    for module, name, limit in SMALL:
        monkeypatch.setattr(module, name, limit)
    model = Model(seed)
    await model.run(2500)
    await model.finish()
    assert model.problems == []
