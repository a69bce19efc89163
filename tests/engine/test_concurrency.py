"""`gather_bounded`, `KeyLocks`, `GroupSize`, `every` and `run_heavy`."""

import asyncio
import logging
import os
import sys
import threading

import pytest

from pysync.concurrency import (
    GATHER_S,
    NICENESS,
    QUIET_TICKS,
    GroupSize,
    KeyLocks,
    every,
    gather_bounded,
    run_heavy,
)
from pysync.errors import StoreUnavailable


async def test_results_come_in_the_order_of_the_items_and_no_more_calls_run_than_allowed() -> None:
    running = most = 0

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10 - item):
            await asyncio.sleep(0)
        running -= 1
        return item * item

    assert await gather_bounded(3, range(10), work) == [item * item for item in range(10)]
    assert most == 3
    assert await gather_bounded(3, [], work) == []


async def test_after_an_error_no_call_begins_and_those_under_way_end_first() -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        await asyncio.sleep(0)
        if item == 1:
            raise ValueError(item)
        await asyncio.sleep(0)
        ended.append(item)

    with pytest.raises(ValueError, match="1"):
        await gather_bounded(3, range(100), work)
    assert begun == [0, 1, 2]
    assert ended == [0, 2]


async def test_tolerated_errors_leave_the_other_calls_alone() -> None:
    done: list[int] = []

    async def work(item: int) -> None:
        if item == 0:
            raise ValueError(item)
        done.append(item)

    with pytest.raises(ValueError, match="0"):
        await gather_bounded(3, range(100), work, max_errors=3)
    assert sorted(done) == list(range(1, 100))


async def test_cancellation_waits_for_the_end_of_the_cancelled_calls() -> None:
    cleaned: list[int] = []
    started = asyncio.Event()

    async def work(item: int) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(item)

    gathering = asyncio.ensure_future(gather_bounded(2, range(5), work))
    await started.wait()
    gathering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gathering
    assert cleaned == [0, 1]


async def test_recurring_work_goes_on_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    errors = iter([StoreUnavailable("the disk is away"), KeyError("x"), None])
    slept: list[float] = []
    done = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def work() -> None:
        error = next(errors)
        if error is not None:
            raise error
        done.set()
        await asyncio.Event().wait()

    log = logging.getLogger("pysync.test")
    task = asyncio.ensure_future(every(5, work, "failed to sweep", log, sleep))
    await done.wait()
    task.cancel()
    await asyncio.wait([task])
    assert slept == [5, 5, 5]
    assert [record.message for record in caplog.records] == [
        "failed to sweep: the disk is away",
        "failed to sweep; will retry",
    ]


def expecting(size: int) -> tuple[GroupSize, list[float]]:
    """A `GroupSize` that has seen a group of this size, and its clock."""
    clock = [0.0]
    group = GroupSize(lambda: clock[0])
    assert group.is_complete(size)
    return group, clock


def test_a_write_that_was_always_alone_does_not_wait() -> None:
    group, _ = expecting(1)
    assert group.is_complete(1)


def test_a_group_waits_until_it_is_as_large_as_the_last_one() -> None:
    group, _ = expecting(32)
    assert [group.is_complete(size) for size in (2, 10, 31, 32)] == [False, False, False, True]


def test_a_group_that_no_longer_grows_is_complete() -> None:
    group, _ = expecting(32)
    assert [group.is_complete(2) for _ in range(QUIET_TICKS + 1)] == [False] * QUIET_TICKS + [True]


def test_a_group_that_grows_slowly_does_not_wait_for_long() -> None:
    group, clock = expecting(1000)
    assert not group.is_complete(1)
    clock[0] = GATHER_S
    assert group.is_complete(2)
    assert not group.is_complete(1)  # the next one waits anew


def test_writes_that_are_alone_after_a_large_group_soon_do_not_wait() -> None:
    group, _ = expecting(4096)
    completed_at_once = 0
    for _ in range(64):
        if group.is_complete(1):
            completed_at_once += 1
        else:
            while not group.is_complete(1):
                pass
    assert completed_at_once > 0
    assert group.is_complete(1)


async def test_holders_of_the_lock_of_one_key_take_turns() -> None:
    locks, order = KeyLocks(), list[str]()

    async def hold(name: str, key: str) -> None:
        async with locks[key]:
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    await asyncio.gather(hold("a", "x"), hold("b", "x"), hold("c", "y"))
    assert order.index("a ends") < order.index("b begins")
    assert order.index("c begins") < order.index("a ends")


async def test_heavy_work_is_done_one_after_another_and_behind_the_event_loop() -> None:
    running = [0, 0]

    def work() -> int:
        running[0] += 1
        running[1] = max(running)
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        running[0] -= 1
        return priority

    found = await asyncio.gather(*(run_heavy(work) for _ in range(8)))
    assert running == [0, 1]
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert set(found) == {min(own + NICENESS, 19)}
