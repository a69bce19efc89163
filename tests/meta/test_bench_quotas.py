"""The bench of quotas: both services answer every workload, and one of them counts."""

from benches import quotas
from benches.workers import Measured
from pysync import config


def test_cost_is_the_median_of_the_ratios_of_each_round() -> None:
    runs = {
        "without": [Measured(1_000.0, 50.0, 10.0, 1.0), Measured(1_000.0, 100.0, 10.0, 1.0)],
        "quotas": [Measured(990.0, 51.0, 10.0, 1.0), Measured(950.0, 104.0, 10.0, 1.0)],
    }
    table = quotas.table({"push": runs})
    assert "| push | 1,000 | 970 | 75.0 | 77.5 | 1.030 (1.020 to 1.040) | 0.970 (0.950 to 0.990) |" in table


def test_settings_switch_quotas_on() -> None:
    parsed = config.parse({"version": 1, "store": "file:data", "quotas": quotas.QUOTAS})
    assert parsed.quotas is not None
    assert set(parsed.quotas.limits()) == {"identity", "namespace", "issuer"}
