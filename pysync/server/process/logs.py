"""The log of a service: the reasons of rejections, an access log, and the formats of all lines. Logs never
contain bodies, secrets or tokens."""

import json
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

import orjson
from aiohttp import web

from pysync import protocol
from pysync.errors import PysyncError
from pysync.server.http.responses import Response


def configure(*, human: bool | None = None, worker: int | None = None, level: str = "info") -> None:
    """Log records of this `level` and above to standard error. The format is text on a terminal and JSON
    elsewhere, unless `human` is given. Every line names the `worker`, if there are several."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty() if human is None else human:
        prefix = "" if worker is None else f"worker {worker}: "
        handler.setFormatter(HumanFormatter(f"%(asctime)s %(levelname)-7s {prefix}%(message)s", "%H:%M:%S"))
    else:
        handler.setFormatter(JsonFormatter(worker))
    own = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(own, logging.INFO), handlers=[handler], force=True)
    # At that level libraries log too much, such as headers with signatures.
    logging.getLogger("pysync").setLevel(own if own < logging.INFO else logging.NOTSET)
    # It logs for each process where it found its credentials, again whenever a role renews them.
    logging.getLogger("aiobotocore").setLevel(logging.WARNING)


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
MAX_SHOWN: Final = 256
"""Characters that are remembered of a path, and of a reason, which may contain a header."""

identity_var: ContextVar[str] = ContextVar("identity", default="")
"""The identity that the signature or token of the current request proves. Set only if there is an access
log."""


class RequestLog:
    """The log lines of a service about its requests. Rejections are logged at the level `info` if
    `logs_refusals`, else at `debug`, and `remember` is called with each; `logs_requests` enables the access
    log. `request_id` is the variable that holds the id of the current request."""

    def __init__(
        self,
        request_id: ContextVar[str | None],
        remember: Callable[..., None],
        *,
        logs_refusals: bool = False,
        logs_requests: bool = False,
    ) -> None:
        self._request_id = request_id
        self._remember = remember
        self._level = logging.INFO if logs_refusals else logging.DEBUG
        self.logs_requests = logs_requests

    def reset_identity(self) -> None:
        """Clear the identity of the previous request of this connection."""
        identity_var.set("")

    def set_identity(self, identity: str) -> None:
        """Set the identity of the current request."""
        identity_var.set(identity)

    def log_rejection(self, request: web.BaseRequest, error: PysyncError, request_id: str) -> None:
        """Log which check a request failed, if its status is one of `LOGGED_STATUSES`."""
        self._log_failed_check("refused a request", request, error, request_id)

    def log_ignored_credentials(self, request: web.BaseRequest, error: PysyncError) -> None:
        """Log why a batch is served as if it had no credentials."""
        self._log_failed_check("refused the credentials of a batch", request, error, self._request_id.get())

    def _log_failed_check(
        self, message: str, request: web.BaseRequest, error: PysyncError, request_id: str | None
    ) -> None:
        if error.status not in LOGGED_STATUSES:
            return
        check, path = error.reason or error.message, protocol.path_of(request.raw_path)
        fields = {"status": error.status, "check": check, "method": request.method, "path": path}
        shown = {**fields, "check": check[:MAX_SHOWN], "path": path[:MAX_SHOWN]}
        self._remember("refusal", requestId=request_id, **shown)
        if REFUSALS.isEnabledFor(self._level):
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
