"""The service answers as it describes itself, whatever is sent (`schemathesis_run.py`)."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.depth import depth

pytestmark = pytest.mark.process

DESCRIBED = Path(__file__).parents[2] / "support/schemathesis_run.py"
LIMIT = f"timeout={depth(300, 3600)}"


@pytest.mark.timeout(depth(600, 7200))
def test_answers_are_as_described() -> None:
    """In a process of its own: where schemathesis is loaded, hypothesis no longer shows what made a test
    fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-o", LIMIT, str(DESCRIBED)]
    done = subprocess.run(
        command, cwd=DESCRIBED.parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()
