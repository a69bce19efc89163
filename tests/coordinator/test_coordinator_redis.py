"""The coordinator in Redis: the contract, and what loss of memory, of replies and of room must not break."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from components import RedisServer, free_port
from components.fixtures import StartRedis
from contracts.change_logs import RETENTION, ChangeLogContract
from contracts.coordinators import CoordinatorContract, LeaseContract
from contracts.fake_time import Advance, FakeTime
from support.redis_losses import (
    WITH_AOF,
    client,
    drop_connections,
    end_and_forget,
    end_and_remember,
    flush,
    return_to_snapshot,
    take_snapshot,
)

from pysync.changelog import Change
from pysync.clock import MAX_COUNTER, SteadyClock, wall_clock_ms
from pysync.concurrency import MAX_WAITING
from pysync.coordinator import Coordinator, open_coordinator
from pysync.coordinator.redis.coordinator import LEEWAY_MS, NONCE_TTL_MS, TICKS, RedisCoordinator
from pysync.coordinator.redis.epoch import EPOCH_KEY
from pysync.errors import CoordinatorUnavailable
from pysync.testing import FakeClock

HOUR_MS = 3_600_000


@pytest.fixture
async def coordinator(redis: RedisServer) -> AsyncIterator[RedisCoordinator]:
    coordinator = await RedisCoordinator.connect(redis.url)
    yield coordinator
    await coordinator.close()


class RedisTime(FakeTime):
    """The time of a Redis: what is to expire there expires as much earlier as the clock is moved."""

    slack_ms = 10_000

    @pytest.fixture
    def clock(self) -> FakeClock:
        # Ahead of Redis', whose memory begins with the test: the contract signs at the clock's time.
        return FakeClock(wall_clock_ms() + 3_600_000)

    @pytest.fixture
    def advance(self, clock: FakeClock, redis: RedisServer) -> Advance:
        async def advance(ms: int) -> None:
            clock.now_ms += ms
            async with client(redis) as own:
                async for key in own.scan_iter():
                    left_ms = await own.pttl(key)
                    if left_ms >= 0:
                        await own.pexpire(key, left_ms - ms)

        return advance

    @pytest.fixture
    async def coordinator(self, redis: RedisServer, clock: FakeClock) -> AsyncIterator[RedisCoordinator]:
        coordinator = await RedisCoordinator.connect(redis.url, clock, RETENTION)
        yield coordinator
        await coordinator.close()


class TestRedisCoordinator(RedisTime, CoordinatorContract):
    pass


class TestRedisChangeLog(RedisTime, ChangeLogContract):
    @pytest.fixture
    def log(self, coordinator: RedisCoordinator) -> RedisCoordinator:
        return coordinator


class TestRedisLeaders(RedisTime, LeaseContract):
    @pytest.fixture
    async def pair(
        self, redis: RedisServer, coordinator: RedisCoordinator, clock: FakeClock
    ) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
        other = await RedisCoordinator.connect(redis.url, clock, RETENTION)
        yield coordinator, other
        await other.close()


async def test_redis_timestamps_stay_monotonic_when_its_clock_is_set_back(
    redis: RedisServer, coordinator: RedisCoordinator
) -> None:
    other = await RedisCoordinator.connect(redis.url)
    assert abs((await other.next_timestamp()).ms - wall_clock_ms()) < 60_000
    ahead_ms = wall_clock_ms() + 3_600_000
    async with client(redis) as own:
        await own.xadd(TICKS, {"t": ""}, id=f"{ahead_ms}-{MAX_COUNTER - 1}")
    ticks = [await node.next_timestamp() for node in (coordinator, other, other, coordinator)]
    assert ticks == [(ahead_ms, MAX_COUNTER), (ahead_ms + 1, 0), (ahead_ms + 1, 1), (ahead_ms + 1, 2)]
    await other.close()


async def test_a_redis_without_a_limit_may_have_any_policy(start_redis: StartRedis) -> None:
    coordinator = await RedisCoordinator.connect(start_redis("--maxmemory-policy", "allkeys-lru").url)
    assert await coordinator.consume_nonce("aa", "n", wall_clock_ms())
    await coordinator.close()


@pytest.mark.parametrize("lose", [end_and_forget, end_and_remember, return_to_snapshot, flush])
async def test_accepted_nonce_is_rejected_whatever_redis_forgets(
    redis: RedisServer, lose: Callable[[RedisServer], Awaitable[None]]
) -> None:
    redis.kill()
    redis.start(*(WITH_AOF if lose is end_and_remember else ()))
    node, other = [await RedisCoordinator.connect(redis.url) for _ in range(2)]
    await take_snapshot(redis)
    signed_ms = wall_clock_ms()
    assert await node.consume_nonce("aa", "n", signed_ms)
    await lose(redis)
    for node_ in (node, other):
        assert await is_rejected(node_, "n", signed_ms)
        await come_back(node_)
        assert await is_rejected(node_, "n", signed_ms)
    late = await RedisCoordinator.connect(redis.url)
    assert await is_rejected(late, "n", signed_ms)
    for node_ in (node, other, late):
        await node_.close()


async def test_a_nonce_signed_by_a_clock_two_seconds_ahead_is_rejected_after_a_loss(
    redis: RedisServer,
) -> None:
    node = await RedisCoordinator.connect(redis.url)
    signed_ms = wall_clock_ms() + 1_990
    assert await node.consume_nonce("aa", "n", signed_ms)
    await flush(redis)
    await come_back(node)
    assert await is_rejected(node, "n", signed_ms)
    await node.close()


async def test_nonce_signed_while_the_clock_was_ahead_is_remembered_until_that_time(
    redis: RedisServer,
) -> None:
    clock = FakeClock(wall_clock_ms())
    node = await RedisCoordinator.connect(redis.url, SteadyClock(clock))
    clock.step(HOUR_MS)
    assert await node.consume_nonce("aa", "ahead", clock())
    assert await node.consume_nonce("aa", "usual", clock() - HOUR_MS + 300_000)
    async with client(redis) as own:
        left_ms = sorted([await own.pttl(key) for key in await own.keys("pysync:n:*")])
    assert left_ms[0] <= NONCE_TTL_MS
    assert HOUR_MS + NONCE_TTL_MS - 60_000 < left_ms[1] <= HOUR_MS + NONCE_TTL_MS
    await node.close()


async def is_rejected(coordinator: Coordinator, nonce: str, signed_ms: int) -> bool:
    try:
        return not await coordinator.consume_nonce("aa", nonce, signed_ms)
    except CoordinatorUnavailable:
        return True


async def come_back(coordinator: Coordinator) -> None:
    """Ask until a fresh request is admitted again; it is signed when the leeway after a loss is over."""
    while True:
        try:
            assert await coordinator.consume_nonce("aa", os.urandom(16).hex(), wall_clock_ms() + LEEWAY_MS)
            return
        except CoordinatorUnavailable:
            await asyncio.sleep(0)


async def test_while_redis_comes_and_goes_no_nonce_is_accepted_twice(redis: RedisServer) -> None:
    nodes = [await RedisCoordinator.connect(redis.url) for _ in range(3)]
    accepted: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def consume(node: Coordinator, nonce: str, signed_ms: int) -> None:
        if not await is_rejected(node, nonce, signed_ms):
            accepted[nonce] += 1

    async def sign_and_repeat(name: str) -> None:
        signed: list[tuple[str, int]] = []
        while not is_over.is_set():
            # By a clock as far ahead as it may be, so that what is new is admitted soon after each loss.
            signed.append((f"{name}-{len(signed)}", wall_clock_ms() + LEEWAY_MS - 1))
            repeated = (signed[-1], signed[len(signed) * 9 // 10], signed[len(signed) // 2])
            await asyncio.gather(*(consume(node, *request) for request in repeated for node in nodes))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as callers:
        for n in range(5):
            callers.create_task(sign_and_repeat(f"{n}"))
        for lose in (
            flush,
            drop_connections,
            end_and_forget,
            flush,
            return_to_snapshot,
            end_and_remember,
            flush,
        ):
            await take_snapshot(redis)
            await lose(redis)
            for node in nodes:
                await come_back(node)
        is_over.set()
    assert set(accepted.values()) == {1}
    for node in nodes:
        await node.close()


async def test_a_redis_met_for_the_first_time_rejects_nothing_fresh(redis: RedisServer) -> None:
    for n in range(3):
        coordinator = await RedisCoordinator.connect(redis.url)
        assert await coordinator.consume_nonce("aa", f"{n}", wall_clock_ms())
        await coordinator.close()


async def test_nodes_that_start_at_once_reject_nothing_fresh(redis: RedisServer) -> None:
    nodes = await asyncio.gather(*(RedisCoordinator.connect(redis.url) for _ in range(10)))
    for n, node in enumerate(nodes):
        assert await node.consume_nonce("aa", f"{n}", wall_clock_ms())
    for node in nodes:
        assert not await node.consume_nonce("aa", "0", wall_clock_ms())
        await node.close()


async def test_of_two_nodes_that_say_since_when_redis_remembers_the_first_is_believed(
    redis: RedisServer,
) -> None:
    """Another node says so between what this one reads and what it would write."""
    first: list[RedisCoordinator] = []
    said: list[object] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", redis.port)

        async def back() -> None:
            while text := await from_redis.read(65_536):
                writer.write(text)

        returning = asyncio.ensure_future(back())
        while text := await reader.read(65_536):
            if b"MULTI" in text and not first:
                first.append(await RedisCoordinator.connect(redis.url))
                said.append(await own.get(EPOCH_KEY))
            to_redis.write(text)
        returning.cancel()
        to_redis.close()
        writer.close()

    async with client(redis) as own, await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        await own.delete(EPOCH_KEY)
        port = server.sockets[0].getsockname()[1]
        late = await RedisCoordinator.connect(f"redis://127.0.0.1:{port}/0")
        assert said == [await own.get(EPOCH_KEY)] != [None]
        assert await first[0].consume_nonce("aa", "1", wall_clock_ms())
        assert not await late.consume_nonce("aa", "1", wall_clock_ms())
        await late.close()
        await first[0].close()


async def test_a_count_that_comes_late_finds_its_window(redis: RedisServer) -> None:
    """It read its clock before the window's end, and Redis hears of it after that."""
    clock = FakeClock(60_000 * 1_000_000 + 59_990)
    late, other = [await RedisCoordinator.connect(redis.url, read) for read in (clock, clock)]
    assert [await other.increment("a", 60_000) for _ in range(8)] == [*range(1, 9)]
    async with client(redis) as own:
        (key,) = [key async for key in own.scan_iter("pysync:c:*")]
        await own.pexpire(key, await own.pttl(key) - 20)
    assert await late.increment("a", 60_000) == 9
    clock.now_ms += 10
    assert await other.increment("a", 60_000) == 1
    for node in (late, other):
        await node.close()


@pytest.mark.parametrize("text", [b"", b"x", b"x 1y", b"\xff 1", b"x " + b"9" * 5000])
async def test_unknown_value_in_place_of_the_epoch_is_a_lost_memory(
    redis: RedisServer, coordinator: RedisCoordinator, text: bytes
) -> None:
    async with client(redis) as own:
        await own.set(EPOCH_KEY, text)
    assert await is_rejected(coordinator, "before", wall_clock_ms())
    await come_back(coordinator)
    signed_ms = wall_clock_ms() + LEEWAY_MS
    assert await coordinator.consume_nonce("a", "after", signed_ms)
    await (await RedisCoordinator.connect(redis.url)).close()


@pytest.mark.slow
async def test_a_lost_reply_lets_no_nonce_through_twice(
    redis: RedisServer, coordinator: RedisCoordinator
) -> None:
    signed_ms = wall_clock_ms()
    redis.pause()
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.consume_nonce("aa", "n", signed_ms)
    redis.resume()
    await come_back(coordinator)
    assert not await coordinator.consume_nonce("aa", "n", signed_ms)


@pytest.mark.slow
async def test_a_claim_whose_reply_was_lost_finds_its_own_value(
    redis: RedisServer, coordinator: RedisCoordinator
) -> None:
    redis.pause()
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.put_if_absent("k", b"mine", 60_000)
    redis.resume()
    await come_back(coordinator)
    assert await coordinator.put_if_absent("k", b"mine", 60_000) == b"mine"
    assert await coordinator.put_if_absent("k", b"another's", 60_000) == b"mine"


async def test_a_redis_that_is_out_of_reach_is_not_waited_for(
    redis: RedisServer, coordinator: RedisCoordinator
) -> None:
    redis.kill()
    for call in (
        coordinator.increment("b", 60_000),
        coordinator.append([Change(b"x")]),
        coordinator.read("", 1),
    ):
        with pytest.raises(CoordinatorUnavailable):
            await call
    # What is refused now does not leave the loop's turn.
    rejected = asyncio.ensure_future(coordinator.put_if_absent("k", b"v", 60_000))
    await asyncio.sleep(0)
    assert isinstance(rejected.exception(), CoordinatorUnavailable)


async def test_a_connection_that_was_closed_meanwhile_costs_no_rejection(
    redis: RedisServer, coordinator: RedisCoordinator
) -> None:
    for n in range(3):
        await drop_connections(redis)
        assert await coordinator.consume_nonce("aa", f"{n}", wall_clock_ms())


async def test_a_hundred_at_once_cost_a_few_round_trips(
    redis: RedisServer, coordinator: RedisCoordinator
) -> None:
    async with client(redis) as own:
        before = (await own.info("stats"))["total_reads_processed"]
        now_ms = wall_clock_ms()
        await asyncio.gather(*(coordinator.consume_nonce("aa", f"{n}", now_ms) for n in range(100)))
        after = (await own.info("stats"))["total_reads_processed"]
    assert after - before <= 4


async def test_more_than_may_wait_are_rejected_and_cost_the_others_nothing(
    coordinator: RedisCoordinator,
) -> None:
    node_ = (coordinator.put_if_absent(f"{n}", b"x", 60_000) for n in range(MAX_WAITING + 10))
    outcomes = await asyncio.gather(*node_, return_exceptions=True)
    assert outcomes.count(b"x") == MAX_WAITING
    assert sum(isinstance(outcome, CoordinatorUnavailable) for outcome in outcomes) == 10


async def test_cancelled_command_takes_no_reply_from_others(coordinator: RedisCoordinator) -> None:
    node_ = [asyncio.ensure_future(coordinator.put_if_absent(f"{n}", b"%d" % n, 60_000)) for n in range(10)]
    await asyncio.sleep(0)
    node_[3].cancel()
    outcomes = await asyncio.gather(*node_, return_exceptions=True)
    assert [outcome for outcome in outcomes if isinstance(outcome, bytes)] == [
        b"%d" % n for n in range(10) if n != 3
    ]


async def test_a_full_redis_rejects_and_forgets_nothing(redis: RedisServer) -> None:
    async with client(redis) as own:
        used = (await own.info("memory"))["used_memory"]
        await own.config_set("maxmemory", used + 300_000)
        coordinator = await RedisCoordinator.connect(redis.url)
        signed_ms = wall_clock_ms()
        accepted = 0
        while not await is_rejected(coordinator, f"{accepted}", signed_ms):
            accepted += 1
        assert accepted > 500
        for n in range(accepted):
            assert await is_rejected(coordinator, f"{n}", signed_ms)
        await own.config_set("maxmemory", 0)
        for n in range(accepted):
            assert not await coordinator.consume_nonce("aa", f"{n}", signed_ms)
        assert await coordinator.consume_nonce("aa", "one more", signed_ms)
        await coordinator.close()


async def test_a_master_that_became_a_replica_is_left_until_it_is_one_again(
    redis: RedisServer, coordinator: RedisCoordinator
) -> None:
    signed_ms = wall_clock_ms()
    assert await coordinator.consume_nonce("aa", "n", signed_ms)
    async with client(redis) as own:
        await own.replicaof("127.0.0.1", str(free_port()))
        assert await is_rejected(coordinator, "fresh", signed_ms)
        assert await is_rejected(coordinator, "n", signed_ms)
        await own.replicaof("NO", "ONE")
    await come_back(coordinator)
    assert not await coordinator.consume_nonce("aa", "n", signed_ms)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"), "maxmemory-policy allkeys-lru"),
        (("--maxmemory", "100mb", "--maxmemory-policy", "volatile-ttl"), "set maxmemory-policy noeviction"),
        (("--replicaof", "127.0.0.1", "1"), "is a replica"),
        (("--cluster-enabled", "yes", "--cluster-port", str(free_port())), "is a node of a cluster"),
    ],
)
async def test_a_redis_that_cannot_keep_the_promise_is_not_taken(
    start_redis: StartRedis, options: tuple[str, ...], said: str
) -> None:
    server = start_redis(*options)
    with pytest.raises(ValueError, match=said):
        await open_coordinator(server.url)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (b"redis_version:6.2.14\r\n", r"is version 6\.2\.14; pysync needs 7 or newer"),
        (b"redis_version:7.4.0\r\nrole:master\r\n", "does not tell its run_id"),
        (b"", "is version 0"),
    ],
)
async def test_server_that_does_not_speak_as_a_new_redis_is_rejected(facts: bytes, said: str) -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"pysync:since\r\n")
        writer.write(b"+OK\r\n$%d\r\n%b\r\n*2\r\n$1\r\n1\r\n$1\r\n2\r\n$-1\r\n" % (len(facts), facts))
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    left = asyncio.Event()
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(ValueError, match=said):
            await open_coordinator(f"redis://{host}:{port}")
        await left.wait()


@pytest.mark.slow
async def test_a_redis_that_cannot_be_used_now_is_named_without_its_password(redis: RedisServer) -> None:
    at = f"127.0.0.1:{redis.port}"
    nobody = free_port()
    for url, said in (
        (f"redis://:hush@{at}/0", f"redis at {at}, database 0: "),
        (f"redis://somebody:hush@{at}", "invalid username-password pair"),
        (f"redis://{at}/99", f"redis at {at}, database 99: DB index is out of range"),
        (f"redis://:hush@127.0.0.1:{nobody}/0", f"redis at 127.0.0.1:{nobody}, database 0: "),
    ):
        with pytest.raises(CoordinatorUnavailable, match=said) as rejected:
            await open_coordinator(url)
        assert "hush" not in str(rejected.value)
    redis.pause()
    with pytest.raises(CoordinatorUnavailable, match="no answer within 2 s"):
        await open_coordinator(redis.url)
    redis.resume()


@pytest.mark.parametrize(
    "url",
    [
        "redis:", "redis://", "redis:6379", "redis://h/a", "redis://h/0/1", "redis://:hu/sh@h", "redis://h:x",
        "redis://:hush@h?db=1", "redis://h?ssl_ca_certs=x", "rediss://h?password=hush", "redis://h?host=i",
        "redis://h:99999",
    ],
)  # fmt: skip
async def test_an_url_that_names_no_redis_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be redis://.*quoted") as rejected:
        await open_coordinator(url)
    assert "hu" not in str(rejected.value)


async def test_a_password_is_quoted_as_in_any_url(start_redis: StartRedis) -> None:
    port = start_redis("--requirepass", "p@ss/w:rd#?%").port
    coordinator = await open_coordinator(f"redis://:p%40ss%2Fw%3Ard%23%3F%25@127.0.0.1:{port}")
    assert await coordinator.consume_nonce("aa", "n", wall_clock_ms())
    await coordinator.close()
    with pytest.raises(CoordinatorUnavailable, match="Authentication required"):
        await open_coordinator(f"redis://127.0.0.1:{port}")


async def test_a_user_that_may_use_only_the_keys_of_pysync_is_enough(start_redis: StartRedis) -> None:
    user = ("--user", "pysync", "on", ">secret", "~pysync:*", "+@all")
    coordinator = await RedisCoordinator.connect(f"redis://pysync:secret@127.0.0.1:{start_redis(*user).port}")
    name = await coordinator.prepare([Change(b"{}")])
    await coordinator.abort(name)
    assert await coordinator.prepared(1) == []
    await coordinator.close()
