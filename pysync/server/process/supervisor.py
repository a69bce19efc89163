"""Worker processes under one parent: forked, restarted when they die, and stopped gracefully.

The parent is simple and synchronous. It has no event loop and no threads, so it may fork at any time, and
little can make it fail.

A worker that stops sending heartbeats is killed and replaced, because it may hold a lock that all others wait
for. So is one that takes another's place and is not ready in time. The parent measures the silence in rounds
of its own rather than by a clock: if the whole machine was suspended, the time that passed meanwhile counts
as one round.

All workers apply another configuration, or none. The parent reads it once, and each worker prepares for it.
If one refuses, ends or takes too long, nothing changes. Otherwise all apply it, and one that then ends or
takes too long is replaced. Workers that start later begin with what is in force.
"""

import faulthandler
import gc
import logging
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count as numbers
from typing import Any, Final, NoReturn

from pysync.errors import ReloadRefused
from pysync.server.process.systemd import sd_notify
from pysync.server.process.worker import (
    DUMP_SIGNAL,
    ROUNDS,
    STALL_S,
    Apply,
    Outcome,
    Prepare,
    WorkerContext,
    WorkerFailed,
    WorkerProcess,
    connect,
    pickled,
    read_available,
)

RESTART_S: Final = 2.0
"""Seconds from one start of a worker to the next. A worker that lived for longer is replaced at once."""

GRACE_S: Final = 2.0
"""Seconds that a worker has to close its store after it stopped waiting for requests."""

START_ROUNDS: Final = 6 * ROUNDS
"""Rounds after which a worker that replaces another is killed and replaced if it is not ready."""

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_HANDLED_SIGNALS: Final = (*_STOP_SIGNALS, signal.SIGHUP, signal.SIGCHLD)

log = logging.getLogger("pysync.server")


@dataclass(slots=True)
class _Slot:
    """A slot of a worker. Without one, `due_at` is the time when the next is due."""

    worker: WorkerProcess | None = None
    due_at: float = 0.0


class Supervisor:
    """Runs `work` in `count` processes. `work` receives its context, calls `ready` on it, then
    `send_heartbeat` every `heartbeat_s`, and returns once it has drained after SIGTERM or after the end of
    the parent, for which it may take `drain_s`. A worker that sends no heartbeat for `stall_s` is killed and
    replaced, and so is a replacement that is not ready in six times as long. `on_replace` is called with the
    reason of each replacement, `ended` or `stalled`. On SIGHUP, or if a worker asks, `read` returns another
    configuration, or raises ReloadRefused. `use` puts it in force for workers that start from then on, and
    returns the members that have changed. `now` is a clock in seconds."""

    def __init__(
        self,
        count: int,
        work: Callable[[WorkerContext], None],
        drain_s: float,
        *,
        stall_s: float = STALL_S,
        on_replace: Callable[[str], None] = lambda reason: None,
        read: Callable[[], Any] = lambda: None,
        use: Callable[[Any], Sequence[str]] = lambda config: (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self.drain_s = drain_s
        self._stall_s = stall_s
        self._on_replace = on_replace
        self._read = read
        self._use = use
        self._now = now
        self._slots = {number: _Slot() for number in range(1, count + 1)}
        self._signals = 0  # number of SIGTERM and SIGINT received
        self._hung_up = False  # SIGHUP was received
        self._numbers = numbers(1)

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
        with _signal_pipe() as self._signal_pipe:
            try:
                self._start([first])
                self._start(others)
                if not self._signals:
                    on_ready()
                self._supervise()
            finally:
                ended_well = self._stop_all()
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
            if self._is_reload_due():
                self._reload()
            for number, slot in self._slots.items():
                if slot.worker is None and slot.due_at <= now:
                    self._restart(number)
            waiting = [slot.due_at for slot in self._slots.values() if slot.worker is None]
            for ended in self._wait(max(0.0, min([round_ends, *waiting]) - now)):
                if not self._signals:
                    self._replace(ended)

    def _is_reload_due(self) -> bool:
        """Return True if a reload is wanted, and no worker is about to start with what is in force now."""
        workers = self._workers()
        is_wanted = self._hung_up or any(worker.wants_reload for worker in workers)
        return is_wanted and all(worker.is_ready for worker in workers)

    def _reload(self) -> None:
        """Have all workers apply another configuration, or none."""
        self._hung_up = False
        asking = [worker for worker in self._workers() if worker.wants_reload]
        for worker in asking:
            worker.wants_reload = False
        try:
            config = self._read()
            self._send_all(Prepare(next(self._numbers), config))
        except ReloadRefused as error:
            log.error("did not reload the configuration: %s", error)
            outcome = Outcome(reason=str(error))
        else:
            outcome = Outcome(self._use(config))
            self._apply(Apply(next(self._numbers)))
            log.info("reloaded the configuration; changed: %s", ", ".join(outcome.changed) or "nothing")
        for worker in asking:
            worker.send(outcome)

    def _apply(self, message: Apply) -> None:
        """Have all workers apply what they have prepared. Kill those that do not: others take their place."""
        with suppress(ReloadRefused):
            self._send_all(message)
        for worker in self._workers():
            if not (worker.has_replied(message) or self._signals):
                log.error("worker %s does not apply the configuration and is killed", worker.number)
                worker.is_stalled = True
                os.kill(worker.pid, signal.SIGKILL)

    def _send_all(self, message: Prepare | Apply) -> None:
        """Send a message to all workers, and wait for their replies. Raises ReloadRefused if one gives a
        reason against it, ends or does not reply in time, and if the parent is to stop."""
        workers, ends_at = self._workers(), self._now() + self._stall_s
        for worker in workers:
            worker.send(message)
        while not all(worker.has_replied(message) or worker.status is not None for worker in workers):
            left_s = ends_at - self._now()
            if self._signals:
                raise ReloadRefused("the server stops")
            if left_s <= 0:
                break
            for ended in self._wait(left_s):
                self._replace(ended)
        for worker in workers:
            if not worker.has_replied(message):
                silent = f"has not answered for {self._stall_s:g} s"
                end = silent if worker.status is None else worker.end_reason
                raise ReloadRefused(f"worker {worker.number} {end}")
            if worker.reply is not None and worker.reply.reason:
                raise ReloadRefused(worker.reply.reason)

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

    def _replace(self, ended: WorkerProcess) -> None:
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
        deadline = self._now() + self.drain_s + GRACE_S
        while self._workers() and self._signals < 2 and (left := deadline - self._now()) > 0:
            # A worker that SIGTERM itself ends had not begun to serve.
            ended_well &= all(worker.status in (0, -signal.SIGTERM) for worker in self._wait(left))
        if self._workers():
            ended_well = False
            if self._signals >= 2:
                sys.stderr.write("stopped at once\n")
            else:
                log.error("workers did not end in %.1f s", self.drain_s + GRACE_S)
        for worker in self._workers():
            os.kill(worker.pid, signal.SIGKILL)
        while self._workers():
            self._wait(None)
        return ended_well

    def _workers(self) -> list[WorkerProcess]:
        return [slot.worker for slot in self._slots.values() if slot.worker is not None]

    def _wait(self, timeout_s: float | None) -> list[WorkerProcess]:
        """Wait for an event, and return the workers that have ended. Signals are counted."""
        with selectors.PollSelector() as selector:
            selector.register(self._signal_pipe[0], selectors.EVENT_READ)
            for worker in self._workers():
                if not worker.has_hung_up:
                    selector.register(worker.channel, selectors.EVENT_READ)
                if not worker.is_ready:
                    selector.register(worker.pipe_fd, selectors.EVENT_READ)
            selector.select(timeout_s)
        received = read_available(self._signal_pipe[0])
        self._signals += sum(number in _STOP_SIGNALS for number in received)
        self._hung_up |= signal.SIGHUP in received
        for worker in self._workers():
            worker.read_pipe()
            worker.read_channel()
        return [worker for worker in self._workers() if self._has_ended(worker)]

    def _has_ended(self, worker: WorkerProcess) -> bool:
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid == 0:
            return False
        worker.status = os.waitstatus_to_exitcode(status)
        worker.read_pipe()
        os.close(worker.pipe_fd)
        worker.channel.close()
        self._slots[worker.number].worker = None
        return True

    def _fork(self, number: int) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        parents_channel, channel = connect(self._stall_s)
        # A signal must not reach the child while it still has the parent's handlers and pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                parents_channel.close()
                context = WorkerContext(number, channel, write_end, self._stall_s / ROUNDS)
                self._run_child(context, read_end)
        except OSError:
            os.close(read_end)
            parents_channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
            os.close(write_end)
            channel.close()
        self._slots[number].worker = WorkerProcess(number, pid, read_end, parents_channel, self._now())

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
            for fd in (pipe_fd, *self._signal_pipe):
                os.close(fd)
            for worker in self._workers():
                os.close(worker.pipe_fd)
                worker.channel.close()
            faulthandler.register(DUMP_SIGNAL, context.pipe_fd)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
            self._work(context)
            status = 0
        except Exception as error:
            error.add_note(traceback.format_exc())
            os.write(context.pipe_fd, pickled(error))
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
