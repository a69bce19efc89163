"""The functions of the core in the portable build beside `make build NATIVE=1`.

    python -m benches.builds

Compiles both below target/builds, loads each in a process of its own, and measures them row by row in turns;
which of the two goes first alternates. The table shows the median of the rounds, in microseconds a call, and
the median of the ratios of each round.
"""

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benches.servers import BUILD, CHECKOUT

ROUNDS = 9
BUILDS = ("portable", "native")
LIMIT = 1.05


def compiled(build: str) -> Path:
    """The extension in this build, compiled if it is older than its sources."""
    flags = ["make", "-s", "--eval", "flags: ; @echo $(RUSTFLAGS)", "NATIVE=1", "flags"]
    folder = BUILD / "builds" / build
    environment = {name: value for name, value in os.environ.items() if name != "RUSTFLAGS"}
    if build == "native":
        environment["RUSTFLAGS"] = subprocess.check_output(flags, cwd=CHECKOUT, text=True).strip()
    command = [
        "cargo",
        "build",
        "--release",
        "--quiet",
        "--lib",
        "--features",
        "python",
        "--target-dir",
        str(folder),
    ]
    subprocess.run(command, cwd=CHECKOUT, env=environment, check=True)
    return folder / "release" / ("lib_core.dylib" if sys.platform == "darwin" else "lib_core.so")


def answer(library: str) -> None:
    """Measure a row of `benches.core` with this library for each number on standard input."""
    loader = importlib.machinery.ExtensionFileLoader("pysync._core", library)
    spec = importlib.util.spec_from_loader("pysync._core", loader)
    assert spec is not None
    sys.modules["pysync._core"] = importlib.util.module_from_spec(spec)
    loader.exec_module(sys.modules["pysync._core"])
    core = importlib.import_module("benches.core")
    cases = core.cases()
    print(json.dumps([case.name for case in cases]), flush=True)
    for line in sys.stdin:
        print(statistics.median(core.microseconds(cases[int(line)].call)), flush=True)


class Child:
    """A process that has loaded one build."""

    def __init__(self, build: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benches.builds", compiled(build)],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = json.loads(self._line())

    def measure(self, row: int) -> float:
        assert self.process.stdin is not None
        print(row, file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def main() -> int:
    if len(sys.argv) > 1:
        answer(sys.argv[1])
        return 0
    children = {build: Child(build) for build in BUILDS}
    names = children["portable"].names
    taken: dict[tuple[str, int], list[float]] = {
        (build, row): [] for build in BUILDS for row in range(len(names))
    }
    for number in range(ROUNDS):
        for row in range(len(names)):
            for build in BUILDS[:: -1 if number % 2 else 1]:
                taken[build, row].append(children[build].measure(row))
    worst = 0.0
    print(f"{'':36} {'portable us':>11} {'native us':>11} {'ratio':>7}")
    for row, name in enumerate(names):
        portable, native = taken["portable", row], taken["native", row]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(portable, native, strict=True))
        worst = max(worst, ratio)
        print(f"{name:36} {statistics.median(portable):11.2f} {statistics.median(native):11.2f} {ratio:7.3f}")
    print(f"highest ratio: {worst:.3f} (limit {LIMIT})")
    return worst > LIMIT


if __name__ == "__main__":
    sys.exit(main())
