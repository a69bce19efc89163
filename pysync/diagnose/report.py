"""The findings of `pysync check --probe`."""

import statistics
from dataclasses import dataclass, field

from pysync.clock import CLOCK_TOLERANCE_MS
from pysync.config import Problem


@dataclass(slots=True)
class Report:
    """The results of the checks. A problem prevents `pysync serve` from working; a warning does not."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def add_timing(self, what: str, each_s: list[float]) -> None:
        """Add a row with the median and maximum of the durations `each_s` of an operation."""
        median_ms, worst_ms = statistics.median(each_s) * 1000, max(each_s) * 1000
        self.rows.append((what, f"{median_ms:.1f} ms, at worst {worst_ms:.1f} ms"))

    def add_clock_skew(self, of: str, skew_ms: int | None) -> None:
        """Add a row with the difference between this clock and a server's, unless they share one."""
        if skew_ms is None:
            return
        seconds = round(abs(skew_ms) / 1000)
        difference = f"this machine's is {seconds} s {'ahead' if skew_ms > 0 else 'behind'}"
        self.rows.append((f"{of} clock", difference if seconds > 1 else "as this machine's"))
        if abs(skew_ms) > CLOCK_TOLERANCE_MS:
            self.warnings.append(Problem(of, f"the clocks differ: {difference}; set it"))
