"""The benches that compare: with a bare server and the floor of a request, and with another checkout."""

from pathlib import Path

import pytest

from benches import compare, floors, half_load, regression, servers
from benches.compare import Goal, Turn
from benches.floors import Prices, Work
from benches.half_load import LIMIT_S, Waits
from benches.workloads import WORKLOADS, Workload
from pysync.cli.load_generator import Measurement

PRICES = Prices(
    alone_us=16.0,
    signature_us=8.0,
    hashed_us=0.5,
    checked_us=0.05,
    copied_us=0.025,
    flushed_us={1_024: 10.0},
)


def measured(workload: str, per_second: float) -> Measurement:
    return Measurement(workload, 100, {}, 1.0, per_second, 1.0, 0.5, 1.5, 0.5, 1e6 / per_second)


def test_a_floor_is_a_bare_request_and_the_work_that_nobody_can_leave_out() -> None:
    work = Work(signatures=2, hashed=2_048, checked=10_240, copied=4_096, flushed=1_024)
    assert PRICES.cost_us(work) == pytest.approx(16.0 + 1.0 + 0.5 + 0.1 + 10.0)
    assert PRICES.cost_us(floors.NO_WORK) == 0.0
    turn = Turn(measured("bare-post", 20_000.0), measured("signed-push", 5_000.0))
    assert compare.floor_columns([turn] * 3, 30.0) == ["80.0", "2.50"]


def test_every_row_has_a_floor_beside_what_it_takes() -> None:
    goals = [
        Goal("push", "bare-post", Work(flushed=1_024), share=0.45),
        Goal("push-512k", "bare-post", mb_per_second=100),
    ]
    turns = {
        goal.workload: [Turn(measured(goal.of, 20_000.0), measured(goal.workload, 10_000.0))] * 2
        for goal in goals
    }
    for prices in (None, PRICES):
        lines = compare.table(turns, goals, prices).splitlines()
        assert len(lines) == 5
        assert len({line.count("|") for line in lines}) == 1
    assert lines[3].endswith("| 60.0 | 1.67 |")


def test_every_workload_that_is_flushed_has_a_price_for_its_size() -> None:
    prices = floors.measure({200, 1_024}, compare.SERVER_CORE)
    assert sorted(prices.flushed_us) == [200, 1_024]
    assert min(prices.flushed_us.values()) > 0.0
    assert 0.0 < prices.copied_us < prices.hashed_us < prices.signature_us
    assert prices.checked_us > 0.0
    assert floors.table(prices).count("\n") == 8


@pytest.mark.process
def test_waits_count_from_when_a_request_was_due() -> None:
    with servers.bare() as server:
        found = half_load.measure(server.url, WORKLOADS["bare-get"], 200.0, 0.5, server.pid)
        lost = Workload("lost", lambda author, count: [author.request("/nowhere")] * count)
        failed = half_load.measure(server.url, lost, rate=200.0, seconds=0.1)
    assert (found.workload, found.rate) == ("bare-get", 200.0)
    assert 0.0 < found.p50_ms <= found.p99_ms <= found.p999_ms
    assert found.busy is not None
    assert found.busy > 0.0
    assert failed.busy is None
    assert found.p50_ms < LIMIT_S * 1e3
    assert failed.failed == 20
    assert failed.p50_ms == LIMIT_S * 1e3


def test_waits_are_shown_with_what_failed() -> None:
    runs = [Waits("pull", 5_000.0, 0.2, number, 20.0, 1, 0.01, 0.5) for number in (1.0, 2.0, 9.0)]
    shown = compare.waits_table([runs])
    assert shown.endswith("| pull | 5,000 | 50% | 0.20 | 2.00 (1.00 to 9.00) | 20.00 | 3 | 0.01 |")


@pytest.mark.parametrize("power", [0.5, 0.7, 1.0])
def test_a_rate_is_found_at_which_a_server_is_half_busy(power: float) -> None:
    found = half_load.half_busy_rate(lambda rate: 0.5 * (rate / 4_000) ** power, first=14_000)
    assert found == pytest.approx(4_000, rel=0.1)


def test_the_machine_is_named_with_its_instruction_sets() -> None:
    named = compare.machine().partition("none of")[0]
    flags = Path("/proc/cpuinfo").read_text().split()
    for flag, name in compare.INSTRUCTION_SETS.items():
        assert (flag in flags) == (name in named)


@pytest.mark.process
def test_every_workload_is_measured_on_both_servers_in_each_round(tmp_path: Path) -> None:
    workloads = ("pull", "log-last")
    patient = {"server": {"maxQueueMs": 3_600_000}}  # nothing is refused because others are at work
    with (
        servers.serving(tmp_path / "before", settings=patient) as before,
        servers.serving(tmp_path / "now", settings=patient) as now,
    ):
        found = regression.measure(before, now, workloads, count=2, seconds=0.1, logged=200)
    assert list(found) == list(workloads)
    assert all(len(rounds) == 2 and min(min(costs) for costs in rounds) > 0 for rounds in found.values())


def test_a_ratio_is_the_cost_now_beside_the_cost_before() -> None:
    shown = regression.table({"pull": [(10.0, 11.0), (20.0, 20.0), (10.0, 30.0)]})
    assert shown.endswith("| pull | 10.0 | 20.0 | 1.10 (1.00 to 3.00) |")


@pytest.mark.process
def test_a_checkout_that_is_not_built_has_no_server(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), servers.serving(tmp_path / "data", checkout=tmp_path):
        pass
