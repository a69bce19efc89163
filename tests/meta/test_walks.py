"""The architecture page lists the modules that six kinds of requests pass through."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import budget
import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs/explanation/architecture.md"


def documented() -> dict[str, list[str]]:
    """The walks of the page: `kind (number): modules`, over several lines."""
    section = PAGE.read_text().partition("### The modules of six requests")[2].partition("\n## ")[0]
    blocks = "".join(re.findall(r"```text\n(.*?)```", section, re.DOTALL))
    walks = {}
    for kind, number, modules in re.findall(r"^([a-z ]+) \((\d+)\):\n((?:  .*\n)+)", blocks, re.MULTILINE):
        walks[kind] = modules.split()
        assert len(walks[kind]) == int(number), f"{kind} does not pass through {number} modules"
    return walks


@pytest.mark.process
def test_the_page_lists_the_modules_of_each_request() -> None:
    command = (sys.executable, "-m", "support.request_walks")
    ran = subprocess.run(command, cwd=TESTS, capture_output=True, check=True, env=dict(os.environ))
    traced = json.loads(ran.stdout)
    walks = documented()
    assert walks.keys() == budget.WALKS.keys()
    for kind, modules in walks.items():
        most = budget.WALKS[kind]
        assert len(traced[kind]) <= most, (
            f"a {kind} passes through {len(traced[kind])} modules, {most} are allowed: merge one with its "
            f"neighbour, or take a detour out: {' '.join(traced[kind])}"
        )
        assert set(modules) == set(traced[kind]), f"{kind} passes through: {' '.join(traced[kind])}"
