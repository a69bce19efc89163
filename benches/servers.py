"""Servers as processes of their own: started, pinned, asked when they answer, and ended."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

SERVICE = Path(__file__).with_name("service.json")
EVENTS = Path(__file__).with_name("events.json")
"""In both a request may wait for as long as it likes: on a busy machine, too, every one is answered."""
CHECKOUT = Path(__file__).parent.parent
BUILD = CHECKOUT / "target"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. `start_s`: from starting its process to its first answer."""

    url: str
    pid: int
    start_s: float

    def memory(self) -> "Memory":
        """What the process holds now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())
        rss, own, peak = (int(lines[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon", "VmHWM"))
        return Memory(rss, own, peak)

    def gaps(self) -> "Gaps":
        """The gaps between turns of the loop since this was asked before, of a server with `lag.py`. Raises
        RuntimeError where it does not tell."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
        try:
            connection.request("GET", "/pull/lag/gaps")
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"the gaps are answered {answer.status}: {body[:200]!r}")
        noted = json.loads(body)
        return Gaps(sorted(noted["gaps_ms"]), sorted(noted["cpu_ms"]))

    def forget_peak(self) -> None:
        """Let `peak_mb` begin anew, at what the process holds now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def written_bytes(self) -> int:
        """What the process has had written to disk, all its threads: pages of files, counted whole each time
        that a clean one is written to."""
        counts = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return next(int(line.split(": ")[1]) for line in counts if line.startswith("write_bytes"))


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process holds, in MB: all of it, and without the pages of files that it maps. A database that is
    read through such a mapping counts in `rss` as it grows, and is let go of when memory is short. `peak` is
    the most that `rss` has been."""

    rss_mb: float
    own_mb: float
    peak_mb: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between turns of a server's loop that were due a millisecond after each other, in milliseconds and
    in order: `wall_ms` as the clock has them, `cpu_ms` what the loop's thread computed meanwhile."""

    wall_ms: list[float]
    cpu_ms: list[float]

    def wall(self, share: float) -> float:
        """The gap that so many of all are not longer than."""
        return self.wall_ms[min(int(len(self.wall_ms) * share), len(self.wall_ms) - 1)]


@contextmanager
def bare(core: int | None = None) -> Iterator[Running]:
    """The bare application of `bare.py`."""
    port = free_port()
    with _running(["-m", "benches.bare", str(port)], port, "/", core) as server:
        yield server


@contextmanager
def s3_stub(core: int | None = None) -> Iterator[Running]:
    """The S3 server of `s3_stub.py`."""
    port = free_port()
    with _running(["-m", "benches.s3_stub", str(port)], port, "/", core) as server:
        yield server


@contextmanager
def pysync(core: int | None = None, checkout: Path = CHECKOUT) -> Iterator[Running]:
    """Our server with `service.json`, its documents in a folder of its own."""
    with fresh_folder() as folder, serving(folder, core, checkout=checkout) as server:
        yield server


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """A folder for documents, beside the build: the usual place for temporary files may be memory, where a
    flush costs nothing."""
    BUILD.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=BUILD) as name:
        yield Path(name) / "data"


@contextmanager
def serving(
    folder: Path | None,
    core: int | None = None,
    workers: int = 1,
    config: Path = SERVICE,
    checkout: Path = CHECKOUT,
    program: Sequence[str] = ("-m", "pysync"),
    settings: Mapping[str, object] | None = None,
) -> Iterator[Running]:
    """Our server with the documents in `folder`, or in memory; all its workers answer. `checkout` may be
    another clone, which has been built; `program` are the arguments of Python that run the command line, and
    `settings` members of the configuration, in place of those of the file."""
    port = free_port()
    store = "memory:" if folder is None else f"file:{folder}"
    with TemporaryDirectory() as place:
        if settings:
            members = json.loads(config.read_bytes()) | settings
            config = Path(place, config.name)
            config.write_text(json.dumps(members))
        command = [*program, "serve", "--config", str(config), "--port", str(port), "--store", store]
        command += ["--workers", str(workers)]
        with _running(command, port, "/health", core, tells=True, checkout=checkout) as server:
            yield server


@contextmanager
def nginx(server: Running, core: int) -> Iterator[str]:
    """The URL of an nginx with the site deploy/nginx/cluster.conf in front of a server."""
    port = free_port()
    text = (CHECKOUT / "deploy/nginx/cluster.conf").read_text()
    text = re.sub(r"server node[23]:.*", "", text.replace("node1:8080", urlsplit(server.url).netloc))
    text = text.replace("listen 80 ", f"listen 127.0.0.1:{port} ")
    text = text.replace("include pysync.conf", f"include {CHECKOUT}/deploy/nginx/pysync.conf")
    with TemporaryDirectory() as folder:
        paths = "".join(
            f"{name}_temp_path {name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = Path(folder, "nginx.conf")
        config.write_text(
            "daemon off; master_process off; pid nginx.pid; error_log stderr crit; events "
            f"{{ worker_connections 20000; }} http {{ access_log off; {paths} {text} }}"
        )
        command = ["nginx", "-p", folder, "-c", str(config), "-e", "stderr"]
        with pinned(core):
            process = subprocess.Popen(command)
        try:
            _first_answer(process, port, "/health")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """This thread, and those that it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(
    command: list[str],
    port: int,
    path: str,
    core: int | None,
    *,
    tells: bool = False,
    checkout: Path = CHECKOUT,
) -> Iterator[Running]:
    """A server that answers at `path`; one that `tells` has also written a line: the first worker answers
    before there are others."""
    started = time.perf_counter()
    python = sys.executable if checkout == CHECKOUT else str(checkout / ".venv/bin/python")
    process = subprocess.Popen(
        [python, *command],
        cwd=checkout,
        stdout=subprocess.PIPE if tells else subprocess.DEVNULL,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
    )
    try:
        _first_answer(process, port, path)
        start_s = time.perf_counter() - started
        if process.stdout is not None:
            process.stdout.readline()
        yield Running(f"http://127.0.0.1:{port}", process.pid, start_s)
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _first_answer(process: subprocess.Popen[bytes], port: int, path: str) -> None:
    """Ask every few milliseconds until the server answers. Raises RuntimeError where it ends or takes longer
    than START_LIMIT_S."""
    deadline = time.perf_counter() + START_LIMIT_S
    while process.poll() is None and time.perf_counter() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_LIMIT_S)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.005)
        finally:
            connection.close()
    raise RuntimeError(f"the server does not answer (exit status {process.poll()})")
