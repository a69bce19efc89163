"""The log of a service: the reasons of rejections, an access log, and the formats of all lines. Logs never
contain bodies, secrets or tokens."""

import copy
import json
import logging
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

import orjson
from aiohttp import web

from pysync import protocol
from pysync.errors import PysyncError
from pysync.server.responses import Response


def configure(*, human: bool | None = None, worker: int | None = None, level: str = "info") -> None:
    """Log records of this `level` and above to standard error. The format is text on a terminal and JSON
    elsewhere, unless `human` is given. Every line names the `worker`, if there are several."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty() if human is None else human:
        who = "" if worker is None else f"worker {worker}: "
        handler.setFormatter(HumanFormatter(f"%(asctime)s %(levelname)-7s {who}%(message)s", "%H:%M:%S"))
    else:
        handler.setFormatter(JsonFormatter(worker))
    handler.addFilter(RepeatFilter(handler))
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(own, logging.INFO), handlers=[handler], force=True)
    # At that level libraries log too much, such as headers with signatures.
    logging.getLogger("pysync").setLevel(own if own < logging.INFO else logging.NOTSET)
    # It logs for each process where it found its credentials, again whenever a role renews them.
    logging.getLogger("aiobotocore").setLevel(logging.WARNING)


def flush() -> None:
    """Log the counts of repeated records that still wait for their minute to end. Call it before the process
    ends."""
    for handler in logging.getLogger().handlers:
        for each in handler.filters:
            if isinstance(each, RepeatFilter):
                each.flush()


MAX_REPEATING: Final = 1_000
"""Number of different repeated records that are counted at once. Beyond it, records are logged one by one."""

MAX_REPEATED_IDS: Final = 100
"""Number of request ids in a record that counts others."""


REPEAT_PERIOD_S: Final = 60.0
"""Seconds for which repeated records are counted before the last of them is logged."""


def _start_timer(seconds: float, work: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


class _Repeated:
    """The records like one that was logged, since it was logged."""

    def __init__(self) -> None:
        self.count = 0
        self.last: logging.LogRecord | None = None
        self.request_ids: list[str] = []

    def add(self, record: logging.LogRecord) -> None:
        """Count a record."""
        self.count += 1
        self.last = copy.copy(record)
        self.last.exc_info = self.last.exc_text = None  # a traceback keeps the request in memory
        request_id = getattr(record, "request_id", None)
        if request_id is not None and len(self.request_ids) < MAX_REPEATED_IDS:
            self.request_ids.append(request_id)

    def summary(self) -> logging.LogRecord:
        """Return the last record, without its traceback, with the number of all as the field `repeated` and
        their request ids as `requestIds`."""
        summary = self.last
        assert summary is not None
        counted: dict[str, object] = {"repeated": self.count}
        if self.request_ids:
            counted["requestIds"] = self.request_ids
        fields = getattr(summary, "fields", {}) | counted
        summary.__dict__.update(repeats=None, request_id=None, fields=fields)
        return summary


class RepeatFilter(logging.Filter):
    """Thins out failures that repeat, of which a broken disk causes one for each request. Such records have
    the attribute `repeats`, which is equal for records that say the same.

    The first is logged at once. Those that follow are counted, and each minute the last of them is logged
    with their number, until a minute passes without any. All other records pass. It is thread-safe.
    """

    def __init__(
        self,
        handler: logging.Handler,
        start_timer: Callable[[float, Callable[[], None]], None] = _start_timer,
    ) -> None:
        super().__init__()
        self._handler = handler
        self._start_timer = start_timer
        self._lock = threading.Lock()
        self._repeated: dict[tuple[str, object], _Repeated] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be logged now."""
        repeats = getattr(record, "repeats", None)
        if repeats is None:
            return True
        key = (record.name, repeats)
        with self._lock:
            if (known := self._repeated.get(key)) is not None:
                known.add(record)
                return False
            if len(self._repeated) >= MAX_REPEATING:
                return True
            is_first, self._repeated[key] = not self._repeated, _Repeated()
        if is_first:
            self._begin_period()
        return True

    def flush(self) -> None:
        """Log the counts so far."""
        with self._lock:
            counted = [each for each in self._repeated.values() if each.count]
            self._repeated = {key: _Repeated() for key, each in self._repeated.items() if each.count}
        for each in counted:
            self._handler.handle(each.summary())

    def _begin_period(self) -> None:
        """Call `_end_period` in a minute. If there is no memory for a timer, nothing is counted."""
        try:
            self._start_timer(REPEAT_PERIOD_S, self._end_period)
        except (RuntimeError, MemoryError):
            self.flush()
            with self._lock:
                self._repeated.clear()

    def _end_period(self) -> None:
        try:
            self.flush()
        finally:
            if self._repeated:
                self._begin_period()


class HumanFormatter(logging.Formatter):
    """Formats a record as text, with its fields and the id of its request."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the message with its fields and request id."""
        request_id = getattr(record, "request_id", None)
        text = super().formatMessage(record)
        for name, value in getattr(record, "fields", {}).items():
            text += f" {name}={_format_value(value)}"
        return text if request_id is None else f"{text} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with the number of its worker."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._worker is not None:
            entry["worker"] = self._worker
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            entry["requestId"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return _json(entry)


def _format_value(value: object) -> str:
    """Return a field as text, quoted if it could be mistaken for several."""
    text = str(value)
    is_plain = text.isprintable() and text.isascii() and not {" ", '"', "="} & set(text)
    return text if is_plain and text else _json(text)


def _json(value: object) -> str:
    """Return the value as JSON. Strings from clients that are not valid Unicode are escaped."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return json.dumps(value, default=str)


REFUSALS: Final = logging.getLogger("pysync.refusals")
REQUESTS: Final = logging.getLogger("pysync.access")
LOGGED_STATUSES: Final = frozenset({401, 403, 421})
"""Statuses whose reason is revealed only to the operator."""

identity_var: ContextVar[str] = ContextVar("identity", default="")
"""The identity that the signature or token of the current request proves. Set only if there is an access
log."""


class RequestLog:
    """The log lines of a service about its requests. Rejections are logged at the level `info` if
    `logs_refusals`, else at `debug`; `logs_requests` enables the access log. `request_id` is the variable
    that holds the id of the current request."""

    def __init__(
        self, request_id: ContextVar[str | None], *, logs_refusals: bool = False, logs_requests: bool = False
    ) -> None:
        self._request_id = request_id
        self._level = logging.INFO if logs_refusals else logging.DEBUG
        self.logs_requests = logs_requests

    @property
    def needs_id(self) -> bool:
        """True if handlers may log rejections, so that they need the request id."""
        return self._level == logging.INFO or REFUSALS.isEnabledFor(self._level)

    def reset_identity(self) -> None:
        """Clear the identity of the previous request of this connection."""
        identity_var.set("")

    def set_identity(self, identity: str) -> None:
        """Set the identity of the current request."""
        identity_var.set(identity)

    def log_rejection(self, request: web.BaseRequest, error: PysyncError, request_id: str) -> None:
        """Log which check a request failed, if rejections are logged and its status is one of
        `LOGGED_STATUSES`."""
        self._log_failed_check("refused a request", request, error, request_id)

    def log_ignored_credentials(self, request: web.BaseRequest, error: PysyncError) -> None:
        """Log why a batch is served as if it had no credentials."""
        self._log_failed_check("refused the credentials of a batch", request, error, self._request_id.get())

    def _log_failed_check(
        self, message: str, request: web.BaseRequest, error: PysyncError, request_id: str | None
    ) -> None:
        if error.status in LOGGED_STATUSES and REFUSALS.isEnabledFor(self._level):
            fields = {
                "status": error.status,
                "check": error.reason or error.message,
                "method": request.method,
                "path": protocol.path_of(request.raw_path),
            }
            REFUSALS.log(self._level, message, extra={"request_id": request_id, "fields": fields})

    def log_response(self, request: web.BaseRequest, response: Response, seconds: float) -> None:
        """Log a request and its response. `seconds` is the time until the response began."""
        fields: dict[str, object] = {
            "method": request.method,
            "path": protocol.path_of(request.raw_path),
            "status": response.status,
            "bytes": 0 if request.method == "HEAD" else response.size,
            "ms": round(seconds * 1000, 2),
        }
        if identity := identity_var.get():
            fields["identity"] = identity
        REQUESTS.info("request", extra={"request_id": response.request_id, "fields": fields})
