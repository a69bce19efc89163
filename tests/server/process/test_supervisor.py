"""A supervisor of small processes: what keeps them from starting, and what they leave behind."""

import itertools
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pysync.server.process.supervisor import (
    RESTART_S,
    ROUNDS,
    START_ROUNDS,
    Supervisor,
    WorkerContext,
    _Slot,
    _Worker,
)

SCRIPT = """
import os, select, signal, sys
from pysync.server.process.supervisor import Supervisor, WorkerContext

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
    ("work", "message"),
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
def test_error_that_keeps_a_worker_from_starting_is_raised_and_no_process_left_behind(
    work: str, message: str
) -> None:
    assert outcome(work) == [message, "no child is left"]


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


def test_dying_worker_is_replaced_at_once_but_is_not_started_all_the_time() -> None:
    supervisor = Supervisor(1, lambda post: None, 0.1)
    slot = supervisor._slots[1] = _Slot()
    for started_at in (100.0, 101.0, 200.0):
        supervisor._replace(_Worker(1, 0, 0, started_at, status=1))
        assert slot.due_at == started_at + RESTART_S


def test_hours_that_pass_at_once_count_as_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(1, lambda post: None, 0.1)
    worker = supervisor._slots[1].worker = _Worker(1, 0, 0, 0.0, is_ready=True)
    wakes = iter(range(ROUNDS - 2))
    hours = itertools.count(step=3600)

    def wake(timeout_s: float | None) -> list[_Worker]:
        supervisor._signals = next(wakes, None) is None
        return []

    monkeypatch.setattr(supervisor, "_wait", wake)
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("a worker was killed"))
    supervisor._supervise()
    assert worker.silent_rounds == ROUNDS - 1


STALLING = """
import os, select, signal, sys, time
from pathlib import Path
from pysync.server.process.supervisor import Supervisor, WorkerContext

folder = Path(sys.argv[1])

def hang_here() -> None:
    while True:
        {hang}

def work(post: WorkerContext) -> None:
    post.ready()
    if not (folder / "hung").exists():
        (folder / "hung").touch()
        hang_here()
    os.kill(os.getppid(), signal.SIGTERM)
    while not select.select([post.parent_fd], [], [], post.heartbeat_s)[0]:
        post.send_heartbeat()

Supervisor(1, work, 0.1, stall_s=1, on_replace=print).run(lambda: None)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("hang", "shown"),
    [
        ("time.sleep(1)", "in hang_here"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "in hang_here"),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])", "it did not show its stacks"),
    ],
)
def test_a_worker_that_sends_no_heartbeats_is_logged_with_its_stacks_and_replaced(
    hang: str, shown: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STALLING.replace("{hang}", hang), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == ["stalled"]
    assert "worker 1 has not answered for 1 s and is killed" in done.stderr
    assert shown in done.stderr
    assert "worker 1 was ended by SIGKILL; another starts" in done.stderr


STARTING = """
import os, select, signal, sys, time
from pathlib import Path
from pysync.server.process.supervisor import Supervisor, WorkerContext

folder = Path(sys.argv[1])

def hang_here() -> None:
    while True:
        time.sleep(1)

def work(post: WorkerContext) -> None:
    if (folder / "served").exists() and not (folder / "hung").exists():
        (folder / "hung").touch()
        hang_here()
    post.ready()
    if (folder / "hung").exists():
        os.kill(os.getppid(), signal.SIGTERM)
    select.select([post.parent_fd], [], [])

def end_the_first() -> None:
    (folder / "served").touch()
    os.kill(supervisor._slots[1].worker.pid, signal.SIGKILL)

supervisor = Supervisor(1, work, 0.1, stall_s=0.1, on_replace=print)
supervisor.run(end_the_first)
"""


@pytest.mark.process
def test_a_replacement_that_hangs_before_it_is_ready_is_logged_with_its_stacks_and_replaced(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", STARTING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[:2] == ["ended", "stalled"]
    assert "worker 1 is not ready after 0.6 s and is killed" in done.stderr
    assert "in hang_here" in done.stderr
    assert "worker 1 was ended by SIGKILL; another starts" in done.stderr


def test_a_worker_that_took_long_to_start_has_as_long_as_others_to_answer() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    worker = _Worker(1, 0, read_end, 0.0, silent_rounds=START_ROUNDS)
    os.write(write_end, b"\0")
    worker.read_pipe()
    assert (worker.is_ready, worker.silent_rounds) == (True, 0)
    for fd in (read_end, write_end):
        os.close(fd)


LOCKING = """
import os, select, signal, sqlite3, sys
from pathlib import Path
from pysync.server.process.supervisor import Supervisor, WorkerContext

folder = Path(sys.argv[1])

def work(post: WorkerContext) -> None:
    post.ready()
    database = sqlite3.connect(folder / "test.db", isolation_level=None, timeout=0)
    if post.number == 1 and not (folder / "held").exists():
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("BEGIN IMMEDIATE")
        (folder / "held").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    while not select.select([post.parent_fd], [], [], post.heartbeat_s)[0]:
        post.send_heartbeat()
        if post.number == 2 and (folder / "held").exists():
            try:
                database.execute("CREATE TABLE written(by)")
            except sqlite3.OperationalError as error:
                print(error, flush=True)
            else:
                os.kill(os.getppid(), signal.SIGTERM)
                return

Supervisor(2, work, 0.1, stall_s=0.5).run(lambda: None)
"""


@pytest.mark.process
def test_a_write_lock_that_a_stopped_worker_holds_is_free_once_it_is_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert set(done.stdout.splitlines()) <= {"database is locked"}
    assert "worker 1 has not answered for 0.5 s" in done.stderr


def test_an_error_is_reported_whatever_came_before_it() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    worker = _Worker(1, 0, read_end, 0.0)
    reported = pickle.dumps(ValueError("x" * 100))
    for part in (b"\0", b"Stack\0 of a thread\n", b"\0\0", reported[:20], reported[20:]):
        os.write(write_end, part)
        worker.read_pipe()
    for fd in (read_end, write_end):
        os.close(fd)
    assert worker.is_ready
    assert worker.stacks == "Stack of a thread"
    assert repr(worker.error) == repr(ValueError("x" * 100))
