"""Worker processes under one parent: forked, restarted when they die, and stopped gracefully.

The parent is simple and synchronous. It has no event loop and no threads, so it may fork at any time, and
little can make it fail. Two pipes connect it to each worker. On one the worker reports that it is ready, that
its event loop still runs, or the error that kept it from starting; the other closes when the parent ends.

A worker that stops sending heartbeats is killed and replaced, because it may hold a lock that all others wait
for. So is one that takes another's place and is not ready in time. The parent measures the silence in rounds
of its own rather than by a clock: if the whole machine was suspended, the time that passed meanwhile counts
as one round.
"""

import faulthandler
import gc
import logging
import os
import pickle
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from pysync.server.process.systemd import sd_notify

RESTART_S: Final = 2.0
"""Seconds from one start of a worker to the next. A worker that lived for longer is replaced at once."""

GRACE_S: Final = 2.0
"""Seconds that a worker has to close its store after it stopped waiting for requests."""

STALL_S: Final = 10.0
"""Seconds without a heartbeat after which a worker is killed and replaced, and a process is not healthy."""

ROUNDS: Final = 10
"""Heartbeats that a worker sends in that time, and rounds in which the parent looks for them."""

START_ROUNDS: Final = 6 * ROUNDS
"""Rounds after which a worker that replaces another is killed and replaced if it is not ready."""

DUMP_SIGNAL: Final = signal.SIGUSR1
"""The signal on which a worker writes the stacks of its threads to the pipe of its heartbeats."""

_HEARTBEAT: Final = b"\0"
_PICKLE: Final = b"\x80"
"""The first byte of a reported error. Neither a heartbeat nor a stack contains it."""

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_HANDLED_SIGNALS: Final = (*_STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD)

NO_RELOAD: Final = (
    "SIGHUP is ignored: there is no reload; to apply another configuration restart the service "
    "(SIGTERM drains it, then start it again)"
)

log = logging.getLogger("pysync.server")


class WorkerFailed(OSError):
    """A worker ended before it was ready, and did not report why."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's own slot: its `number`, from 1, which its replacement has too, and `parent_fd`, which
    becomes readable when the parent ends. A worker that is ready calls `send_heartbeat` every
    `heartbeat_s`."""

    number: int
    parent_fd: int
    pipe_fd: int
    heartbeat_s: float = STALL_S / ROUNDS

    def ready(self) -> None:
        """Report to the parent that this worker serves. If the parent has ended, `parent_fd` shows it."""
        self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Report to the parent that this worker still answers. If the parent reads nothing, because it is
        stopped, a full pipe is report enough."""
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self.pipe_fd, _HEARTBEAT)


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    pid: int
    pipe_fd: int
    """Read end of the pipe on which the worker reports."""
    started_at: float
    output: bytes = b""
    """Stacks and the error that it reported."""
    is_ready: bool = False
    """True once the worker has reported that it serves."""
    silent_rounds: int = 0
    """Rounds without a heartbeat, or those since its start if it is not ready."""
    is_stalled: bool = False
    """True once it was killed because it did not answer."""
    status: int | None = None
    """Exit status; negative for a signal, None while it runs."""

    def read_pipe(self) -> None:
        """Read the report of the worker."""
        report = _read_available(self.pipe_fd)
        if _PICKLE in self.output:  # the rest of an error
            self.output += report
            return
        text, mark, error = report.partition(_PICKLE)
        if _HEARTBEAT in text:
            if self.silent_rounds < ROUNDS or not self.is_ready:
                self.silent_rounds = 0
            self.is_ready = True
        self.output += text.replace(_HEARTBEAT, b"") + mark + error

    @property
    def stacks(self) -> str:
        """The stacks that the worker wrote when it was asked for them."""
        return self.output.partition(_PICKLE)[0].decode("ascii", "replace").strip()

    @property
    def error(self) -> Exception | None:
        """The error with which the worker ended; None if it reported none."""
        _, mark, rest = self.output.partition(_PICKLE)
        try:
            error = pickle.loads(mark + rest)  # noqa: S301 - our own child's, on our own pipe
        except Exception:
            return None
        return error if isinstance(error, Exception) else None

    @property
    def end_reason(self) -> str:
        """The exit status or signal with which the worker ended, in words."""
        assert self.status is not None
        if self.status >= 0:
            return f"ended with status {self.status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-self.status, f'signal {-self.status}')}"


@dataclass(slots=True)
class _Slot:
    """A slot of a worker. Without one, `due_at` is the time when the next is due."""

    worker: _Worker | None = None
    due_at: float = 0.0


class Supervisor:
    """Runs `work` in `count` processes. `work` receives its context, calls `ready` on it, then
    `send_heartbeat` every `heartbeat_s`, and returns once it has drained after SIGTERM or after the end of
    the parent, for which it may take `drain_s`. A worker that sends no heartbeat for `stall_s` is killed and
    replaced, and so is a replacement that is not ready in six times as long. `on_replace` is called with the
    reason of each replacement, `ended` or `stalled`. `now` is a clock in seconds."""

    def __init__(
        self,
        count: int,
        work: Callable[[WorkerContext], None],
        drain_s: float,
        *,
        stall_s: float = STALL_S,
        on_replace: Callable[[str], None] = lambda reason: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._drain_s = drain_s
        self._stall_s = stall_s
        self._on_replace = on_replace
        self._now = now
        self._slots = {number: _Slot() for number in range(1, count + 1)}
        self._signals = 0  # number of SIGTERM and SIGINT received

    def run(self, on_ready: Callable[[], None]) -> int:
        """Start the workers, call `on_ready` once all serve, and restart those that die until SIGTERM or
        SIGINT; then stop them. A second signal kills them at once.

        Returns 0 if all workers ended by themselves without an error, else 1. Raises the error that kept a
        worker from starting. The first worker starts alone, so that such an error occurs once and leaves no
        other worker behind.
        """
        first, *others = self._slots
        gc.collect()
        gc.freeze()  # keep memory shared with workers: their collectors then do not write to it
        self._parent_pipe = os.pipe()
        with _signal_pipe() as self._signal_pipe:
            try:
                self._start([first])
                self._start(others)
                if not self._signals:
                    on_ready()
                self._supervise()
            finally:
                ended_well = self._stop_all()
                for fd in self._parent_pipe:
                    os.close(fd)
        return 0 if ended_well else 1

    def _start(self, numbers: list[int]) -> None:
        """Start workers and wait until they are ready, or until a stop signal."""
        if not self._signals:
            for number in numbers:
                self._fork(number)
        while not self._signals and not all(worker.is_ready for worker in self._workers()):
            ended = self._wait(None)
            if ended and not self._signals:
                raise ended[0].error or WorkerFailed(
                    f"worker {ended[0].number} {ended[0].end_reason} at its start"
                )

    def _supervise(self) -> None:
        """Restart workers that die or stall until a stop signal."""
        round_s = self._stall_s / ROUNDS
        round_ends = self._now() + round_s
        while not self._signals:
            now = self._now()
            if now >= round_ends:  # however long ago: one round
                self._end_round()
                round_ends = now + round_s
            for number, slot in self._slots.items():
                if slot.worker is None and slot.due_at <= now:
                    self._restart(number)
            waiting = [slot.due_at for slot in self._slots.values() if slot.worker is None]
            for ended in self._wait(max(0.0, min([round_ends, *waiting]) - now)):
                if not self._signals:
                    self._replace(ended)

    def _end_round(self) -> None:
        """Count this round for each worker that sent no heartbeat in it. Ask a worker that stalls for its
        stacks, and kill it one round later. Tell systemd that this process runs."""
        sd_notify("WATCHDOG=1")
        for worker in self._workers():
            worker.silent_rounds += 1
            most = ROUNDS if worker.is_ready else START_ROUNDS
            if worker.silent_rounds == most:
                os.kill(worker.pid, DUMP_SIGNAL)
                os.kill(worker.pid, signal.SIGCONT)  # a stopped process handles no signal
            elif worker.silent_rounds == most + 1:
                log.error(
                    "worker %s %s %g s and is killed: %s",
                    worker.number,
                    "has not answered for" if worker.is_ready else "is not ready after",
                    self._stall_s * most / ROUNDS,
                    f"its stacks are\n{worker.stacks}" if worker.stacks else "it did not show its stacks",
                )
                worker.is_stalled = True
                os.kill(worker.pid, signal.SIGKILL)

    def _replace(self, ended: _Worker) -> None:
        self._on_replace("stalled" if ended.is_stalled else "ended")
        self._slots[ended.number].due_at = ended.started_at + RESTART_S
        log.error("worker %s %s; another starts", ended.number, ended.end_reason, exc_info=ended.error)

    def _restart(self, number: int) -> None:
        try:
            self._fork(number)
        except OSError as error:
            self._slots[number].due_at = self._now() + RESTART_S
            log.error("worker %s cannot start: %s; will retry", number, error)

    def _stop_all(self) -> bool:
        """Let all workers drain, and kill those that do not end. Return True if all ended by themselves."""
        for worker in self._workers():
            os.kill(worker.pid, signal.SIGTERM)
        ended_well = True
        deadline = self._now() + self._drain_s + GRACE_S
        while self._workers() and self._signals < 2 and (left := deadline - self._now()) > 0:
            # A worker that SIGTERM itself ends had not begun to serve.
            ended_well &= all(worker.status in (0, -signal.SIGTERM) for worker in self._wait(left))
        if self._workers():
            ended_well = False
            if self._signals >= 2:
                sys.stderr.write("stopped at once\n")
            else:
                log.error("workers did not end in %.1f s", self._drain_s + GRACE_S)
        for worker in self._workers():
            os.kill(worker.pid, signal.SIGKILL)
        while self._workers():
            self._wait(None)
        return ended_well

    def _workers(self) -> list[_Worker]:
        return [slot.worker for slot in self._slots.values() if slot.worker is not None]

    def _wait(self, timeout_s: float | None) -> list[_Worker]:
        """Wait for an event, and return the workers that have ended. Signals are counted."""
        with selectors.PollSelector() as selector:
            selector.register(self._signal_pipe[0], selectors.EVENT_READ)
            for worker in self._workers():
                if not worker.is_ready:
                    selector.register(worker.pipe_fd, selectors.EVENT_READ)
            selector.select(timeout_s)
        received = _read_available(self._signal_pipe[0])
        self._signals += sum(number in _STOP_SIGNALS for number in received)
        if signal.SIGHUP in received:
            log.warning(NO_RELOAD)
        for worker in self._workers():
            worker.read_pipe()
        return [worker for worker in self._workers() if self._has_ended(worker)]

    def _has_ended(self, worker: _Worker) -> bool:
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            return False
        worker.status = os.waitstatus_to_exitcode(status)
        worker.read_pipe()
        os.close(worker.pipe_fd)
        self._slots[worker.number].worker = None
        return True

    def _fork(self, number: int) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        # A signal must not reach the child while it still has the parent's handlers and pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                context = WorkerContext(number, self._parent_pipe[0], write_end, self._stall_s / ROUNDS)
                self._run_child(context, read_end)
        except OSError:
            os.close(read_end)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
            os.close(write_end)
        self._slots[number].worker = _Worker(number, pid, read_end, self._now())

    def _run_child(self, context: WorkerContext, pipe_fd: int) -> NoReturn:
        """Run a worker in its own process. It never returns, because its caller is the parent's code."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            # A terminal sends these to the whole process group; only the parent handles them.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            for fd in (pipe_fd, *self._signal_pipe, self._parent_pipe[1]):
                os.close(fd)
            for worker in self._workers():
                os.close(worker.pipe_fd)
            faulthandler.register(DUMP_SIGNAL, context.pipe_fd)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
            self._work(context)
            status = 0
        except Exception as error:
            error.add_note(traceback.format_exc())
            os.write(context.pipe_fd, _pickled(error))
        finally:
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(status)


@contextmanager
def _signal_pipe() -> Iterator[tuple[int, int]]:
    """Route the supervisor's signals into a pipe, one byte each, and yield its two ends."""
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    before_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda number, frame: None) for number in _HANDLED_SIGNALS}
    try:
        yield read, write
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        os.close(read)
        os.close(write)


def _read_available(fd: int) -> bytes:
    data = b""
    with suppress(BlockingIOError):
        while piece := os.read(fd, 65_536):
            data += piece
    return data


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(WorkerFailed(f"{type(error).__name__}: {error}"))
