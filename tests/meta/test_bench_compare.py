"""The bench that compares two checkouts: both are asked in each round, and a ratio above 1 costs more."""

from pathlib import Path

import pytest

from benches import regression, servers


@pytest.mark.process
def test_every_workload_is_measured_on_both_servers_in_each_round(tmp_path: Path) -> None:
    workloads = ("pull", "log-last")
    with servers.serving(tmp_path / "before") as before, servers.serving(tmp_path / "now") as now:
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
