"""A supervisor of small processes: what keeps them from starting, and what they leave behind."""

import os
import subprocess
import sys
import time

import pytest

from pysync.server.supervisor import HEALTHY_S, Supervisor, WorkerContext, _Slot, _Worker

SCRIPT = """
import os, select, signal, sys
from pysync.server.supervisor import Supervisor, WorkerContext

def work(post: WorkerContext) -> None:
    {work}
    post.ready()
    select.select([post.parent_fd], [], [])

try:
    status = Supervisor(3, work, 0.1).run(lambda: print("ready", flush=True))
    print("status", status)
except Exception as error:
    print(type(error).__name__, error)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child is left")
"""


def outcome(work: str) -> list[str]:
    """What the script prints with that line of work."""
    command = [sys.executable, "-c", SCRIPT.replace("{work}", work)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()


@pytest.mark.process
@pytest.mark.parametrize(
    ("work", "told"),
    [
        ("raise ValueError('no such store')", "ValueError no such store"),
        ("if post.number == 3: raise OSError(98, 'in use')", "OSError [Errno 98] in use"),
        (
            "if post.number == 2: os.kill(os.getpid(), signal.SIGKILL)",
            "WorkerFailed worker 2 was ended by SIGKILL at its start",
        ),
        (
            "if post.number == 2: os.kill(os.getpid(), 50)",
            "WorkerFailed worker 2 was ended by signal 50 at its start",
        ),
        ("os._exit(7)", "WorkerFailed worker 1 ended with status 7 at its start"),
        ("sys.exit('gone')", "WorkerFailed worker 1 ended with status 1 at its start"),
        ("raise type('Local', (Exception,), {})('unknown here')", "WorkerFailed Local: unknown here"),
    ],
)
def test_what_keeps_a_worker_from_starting_is_raised_and_nobody_left_behind(work: str, told: str) -> None:
    assert outcome(work) == [told, "no child is left"]


@pytest.mark.process
def test_an_end_that_is_wanted_before_all_are_ready_is_no_failure() -> None:
    """The worker asks for it itself, and never becomes ready; the others are ended by the signal."""
    work = "post.number == 2 and (os.kill(os.getppid(), signal.SIGTERM), signal.pause())"
    assert outcome(work) == ["status 0", "no child is left"]


def test_worker_ends_when_its_parent_dies_before_it_is_ready() -> None:
    parent_fd, parents_end = os.pipe()
    parents_line, line = os.pipe()
    for fd in (parents_end, parents_line):
        os.close(fd)
    WorkerContext(1, parent_fd, line).ready()
    assert os.read(parent_fd, 1) == b""
    os.close(line)
    os.close(parent_fd)


@pytest.mark.process
def test_an_output_that_nobody_reads_ends_no_worker_in_disorder() -> None:
    """What a worker could not print is lost; it must not run on in its parent's place."""
    work = "sys.stdout.write('unread'); os.close(1); os.kill(os.getppid(), signal.SIGTERM)"
    assert "no child is left" in outcome(work)


def test_who_dies_again_soon_is_replaced_later_each_time_up_to_a_bound() -> None:
    supervisor = Supervisor(1, lambda post: None, 0.1)
    place = supervisor._slots[1] = _Slot()
    next_waits = []
    for lived_s in [0.0] * 7 + [HEALTHY_S + 1, 0.0]:
        supervisor._replace(_Worker(1, 0, 0, time.monotonic() - lived_s, status=1))
        next_waits.append(place.delay_s)
    assert next_waits == [0.5, 1, 2, 4, 8, 10, 10, 0.5, 1]
