"""Every benchmark works: each runs once with `--quick`, and succeeds."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARGUMENTS = {"regression": ["."]}
"""What a bench needs beside `--quick`."""
RUN_BY_OTHERS, RUN_OTHERS = ("s3_cost",), ("record", "run")
BENCHES = sorted(
    path.stem
    for path in (ROOT / "benches").glob("*.py")
    if '"--quick"' in path.read_text() and path.stem not in (*RUN_BY_OTHERS, *RUN_OTHERS)
)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_works_with_quick(name: str) -> None:
    command = [sys.executable, "-m", f"benches.{name}", "--quick", *ARGUMENTS.get(name, [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
