"""A supervisor of small processes: what keeps them from starting, and what they leave behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pysync.server.process.supervisor import RESTART_S
from pysync.server.process.worker import WorkerContext, connect

SCRIPT = """
import os, select, signal, sys
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import WorkerContext

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
    parents_channel, channel = connect(1.0)
    parents_line, line = os.pipe()
    parents_channel.close()
    os.close(parents_line)
    WorkerContext(1, channel, line).ready()
    with pytest.raises(EOFError):
        channel.recv()
    os.close(line)
    channel.close()


@pytest.mark.process
def test_an_output_that_nobody_reads_ends_no_worker_in_disorder() -> None:
    """What a worker could not print is lost; it must not run on in its parent's place."""
    work = "sys.stdout.write('unread'); os.close(1); os.kill(os.getppid(), signal.SIGTERM)"
    assert "no child is left" in outcome(work)


RETURNING = """
import os, select, signal, sys
from pathlib import Path
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import WorkerContext

clock_s = 0.0

def now() -> float:
    global clock_s
    clock_s += 0.5
    return clock_s

folder = Path(sys.argv[1])

def work(post: WorkerContext) -> None:
    with (folder / "starts").open("a+") as starts:
        print(clock_s, file=starts, flush=True)
        starts.seek(0)
        is_last = len(starts.readlines()) == 3
    post.ready()
    while not (folder / "served").exists():
        select.select([post.parent_fd], [], [], 0.01)
    if is_last:
        os.kill(os.getppid(), signal.SIGTERM)
        select.select([post.parent_fd], [], [])

Supervisor(1, work, 0.1, on_replace=print, now=now).run((folder / "served").touch)
"""


@pytest.mark.process
def test_dying_worker_is_replaced_but_is_not_started_all_the_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RETURNING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == ["ended", "ended"]
    first, second, third = map(float, (tmp_path / "starts").read_text().splitlines())
    assert second - first >= RESTART_S
    assert third - second >= RESTART_S


LEAPING = """
import itertools, os, select, signal
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import ROUNDS, WorkerContext

def work(post: WorkerContext) -> None:
    post.ready()
    for _ in range(5 * ROUNDS):
        select.select([post.parent_fd], [], [], 0.01)
        post.send_heartbeat()
    os.kill(os.getppid(), signal.SIGTERM)
    select.select([post.parent_fd], [], [])

hours = itertools.count(step=3600)
Supervisor(1, work, 0.1, stall_s=1, on_replace=print, now=lambda: next(hours)).run(lambda: None)
"""


@pytest.mark.process
def test_hours_that_pass_at_once_count_as_one_round() -> None:
    command = [sys.executable, "-c", LEAPING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == []


STALLING = """
import os, select, signal, sys, time
from pathlib import Path
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import WorkerContext

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
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import WorkerContext

folder = Path(sys.argv[1])

def hang_here() -> None:
    while True:
        time.sleep(1)

def work(post: WorkerContext) -> None:
    if (folder / "served").exists() and not (folder / "hung").exists():
        (folder / "hung").touch()
        hang_here()
    (folder / "pid").write_text(str(os.getpid()))
    post.ready()
    if (folder / "hung").exists():
        os.kill(os.getppid(), signal.SIGTERM)
    select.select([post.parent_fd], [], [])

def end_the_first() -> None:
    (folder / "served").touch()
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)

Supervisor(1, work, 0.1, stall_s=0.5, on_replace=print).run(end_the_first)
"""


@pytest.mark.process
def test_a_replacement_that_hangs_before_it_is_ready_is_logged_with_its_stacks_and_replaced(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", STARTING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[:2] == ["ended", "stalled"]
    assert "worker 1 is not ready after 3 s and is killed" in done.stderr
    assert "in hang_here" in done.stderr
    assert "worker 1 was ended by SIGKILL; another starts" in done.stderr


LATE = """
import os, select, signal, sys, time
from pathlib import Path
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import WorkerContext

starts, served = Path(sys.argv[1]) / "starts", Path(sys.argv[1]) / "served"

def work(post: WorkerContext) -> None:
    number = len(starts.read_text())
    starts.write_text("." * (number + 1))
    if number == 1:
        time.sleep(1)
    post.ready()
    while not served.exists():
        select.select([post.parent_fd], [], [], 0.01)
        post.send_heartbeat()
    if number == 1:
        time.sleep(3600)
    elif number == 2:
        os.kill(os.getppid(), signal.SIGTERM)
        select.select([post.parent_fd], [], [])

starts.touch()
Supervisor(1, work, 0.1, stall_s=0.5, on_replace=print).run(served.touch)
"""


@pytest.mark.process
def test_a_worker_that_took_long_to_start_is_replaced_as_others_if_it_does_not_answer(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LATE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines() == ["ended", "stalled"]
    assert "worker 1 has not answered for 0.5 s and is killed" in done.stderr


LOCKING = """
import os, select, signal, sqlite3, sys
from pathlib import Path
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import WorkerContext

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


FAILING = """
import os, select, signal, sys
from pathlib import Path
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import DUMP_SIGNAL, WorkerContext

failed, served = Path(sys.argv[1]) / "failed", Path(sys.argv[1]) / "served"

def work(post: WorkerContext) -> None:
    post.ready()
    while not served.exists():
        select.select([post.parent_fd], [], [], 0.01)
    if not failed.exists():
        failed.touch()
        os.kill(os.getpid(), DUMP_SIGNAL)
        post.send_heartbeat()
        raise ValueError("x" * 100)
    os.kill(os.getppid(), signal.SIGTERM)
    select.select([post.parent_fd], [], [])

Supervisor(1, work, 0.1).run(served.touch)
"""


@pytest.mark.process
def test_an_error_is_reported_whatever_came_before_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "worker 1 ended with status 1; another starts" in done.stderr
    assert f"ValueError: {'x' * 100}" in done.stderr
