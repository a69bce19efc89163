"""A worker, on its own side and on that of its parent, and what they say to each other.

On a pipe the worker reports that it is ready, that its event loop still runs, or the error that kept it from
starting. A channel carries reloads, and ends with the parent.
"""

import os
import pickle
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

STALL_S: Final = 10.0
"""Seconds without a heartbeat after which a worker is killed and replaced, and a process is not healthy."""

ROUNDS: Final = 10
"""Heartbeats that a worker sends in that time, and rounds in which the parent looks for them."""

DUMP_SIGNAL: Final = signal.SIGUSR1
"""The signal on which a worker writes the stacks of its threads to the pipe of its heartbeats."""

_HEARTBEAT: Final = b"\0"
_PICKLE: Final = b"\x80"
"""The first byte of a reported error. Neither a heartbeat nor a stack contains it."""


class WorkerFailed(OSError):
    """A worker ended before it was ready, and did not report why."""


class Prepare(NamedTuple):
    """Asks a worker to prepare for a configuration. It replies with the `number` of the message."""

    number: int
    config: Any


class Apply(NamedTuple):
    """Asks a worker to apply what it has prepared, likewise."""

    number: int


class Reply(NamedTuple):
    """A worker's reply to the message with this number: a reason against it, or `""`."""

    number: int
    reason: str = ""


class ReloadRequest(NamedTuple):
    """Asks the parent for a reload."""


class Outcome(NamedTuple):
    """The outcome of the reload that a worker requested: the members that have changed, or why none has."""

    changed: Sequence[str] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's own slot: its `number`, from 1, which its replacement has too, and the `channel` on which it
    receives `Prepare`, `Apply` and `Outcome`, and sends `Reply` and `ReloadRequest`. A worker that is ready
    calls `send_heartbeat` every `heartbeat_s`."""

    number: int
    channel: Connection
    pipe_fd: int
    heartbeat_s: float = STALL_S / ROUNDS

    @property
    def parent_fd(self) -> int:
        """The descriptor that becomes readable when there is a message, or the parent ends."""
        return self.channel.fileno()

    def ready(self) -> None:
        """Report to the parent that this worker serves. If the parent has ended, `parent_fd` shows it."""
        self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Report to the parent that this worker still answers. If the parent reads nothing, because it is
        stopped, a full pipe is report enough."""
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self.pipe_fd, _HEARTBEAT)


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker, as its parent knows it."""

    number: int
    pid: int
    pipe_fd: int
    """Read end of the pipe on which the worker reports."""
    channel: Connection
    started_at: float
    output: bytes = b""
    """Stacks and the error that it reported."""
    is_ready: bool = False
    """True once the worker has reported that it serves."""
    wants_reload: bool = False
    """True if it has requested a reload since the last one began."""
    reply: Reply | None = None
    """The last one."""
    has_hung_up: bool = False
    """True once the channel has ended on its side: it is about to end."""
    silent_rounds: int = 0
    """Rounds without a heartbeat, or those since its start if it is not ready."""
    is_stalled: bool = False
    """True once it was killed because it did not answer."""
    status: int | None = None
    """Exit status; negative for a signal, None while it runs."""

    def read_pipe(self) -> None:
        """Read the report of the worker."""
        report = read_available(self.pipe_fd)
        if _PICKLE in self.output:  # the rest of an error
            self.output += report
            return
        text, mark, error = report.partition(_PICKLE)
        if _HEARTBEAT in text:
            if self.silent_rounds < ROUNDS or not self.is_ready:
                self.silent_rounds = 0
            self.is_ready = True
        self.output += text.replace(_HEARTBEAT, b"") + mark + error

    def read_channel(self) -> None:
        """Read what the worker has sent; nothing once it has ended."""
        try:
            while not self.has_hung_up and self.channel.poll():
                message = self.channel.recv()
                if isinstance(message, ReloadRequest):
                    self.wants_reload = True
                else:
                    self.reply = message
        except (EOFError, OSError):
            self.has_hung_up = True

    def has_replied(self, message: Prepare | Apply) -> bool:
        """Return True if its last answer is to this message."""
        return self.reply is not None and self.reply.number == message.number

    def send(self, message: Prepare | Apply | Outcome) -> None:
        """Send a message. It gets lost if the worker has ended, or does not take it in time."""
        with suppress(OSError):
            self.channel.send(message)

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


def connect(timeout_s: float) -> tuple[Connection, Connection]:
    """Return the two ends of a channel. Sending at the first one, the parent's, raises OSError if the worker
    takes nothing for `timeout_s`."""
    parents, workers = socket.socketpair()
    seconds = int(timeout_s)
    limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1_000_000))
    parents.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return Connection(parents.detach()), Connection(workers.detach())


def read_available(fd: int) -> bytes:
    """Return what can be read without waiting."""
    data = b""
    with suppress(BlockingIOError):
        while piece := os.read(fd, 65_536):
            data += piece
    return data


def pickled(error: Exception) -> bytes:
    """Return an error as text for `WorkerProcess.error`."""
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(WorkerFailed(f"{type(error).__name__}: {error}"))
