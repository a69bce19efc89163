"""All workers of a supervisor apply another configuration, or none: whatever one of them does meanwhile."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.worker import Reply, Apply, ReloadRequest, Outcome, Prepare, WorkerContext

folder, in_force = Path(sys.argv[1]), "old"

def work(post: WorkerContext) -> None:
    own = in_force

    def note() -> None:
        new = folder / f"{post.number}.new"
        new.write_text(own)
        new.replace(folder / str(post.number))

    note()
    post.ready()
    if post.number == 3 and own == "old":
        post.channel.send(ReloadRequest())
    while True:
        while not post.channel.poll(post.heartbeat_s):
            post.send_heartbeat()
        message, reason = post.channel.recv(), ""
        if isinstance(message, Outcome):
            print(*message.changed, *filter(None, [message.reason]), flush=True)
            continue
        if post.number == 2 and own == "old":
            {fault}
        if isinstance(message, Prepare):
            prepared = message.config
        else:
            own = prepared
            note()
        post.channel.send(Reply(message.number, reason))

def use(config: str) -> list[str]:
    global in_force
    in_force = config
    return ["name"]

contents = iter(["new"])
Supervisor(3, work, 0.1, stall_s=1.0, read=lambda: next(contents), use=use).run(lambda: None)
"""


@pytest.mark.parametrize(
    ("fault", "outcome", "in_force"),
    [
        ("pass", "name", "new"),
        ("reason = 'not this one'", "not this one", "old"),
        ("if isinstance(message, Prepare): os.kill(os.getpid(), 9)", "worker 2 was ended by SIGKILL", "old"),
        ("if isinstance(message, Prepare): continue", "worker 2 has not answered for 1 s", "old"),
        ("if isinstance(message, Apply): os.kill(os.getpid(), 9)", "name", "new"),
        ("if isinstance(message, Apply): continue", "name", "new"),
    ],
)
def test_workers_never_serve_two_configurations(
    tmp_path: Path, fault: str, outcome: str, in_force: str
) -> None:
    command = [sys.executable, "-c", SCRIPT.replace("{fault}", fault), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            assert supervisor.stdout.readline() == f"{outcome}\n"
            while [(tmp_path / str(number)).read_text() for number in (1, 2, 3)] != [in_force] * 3:
                time.sleep(0.01)
        finally:
            supervisor.terminate()
