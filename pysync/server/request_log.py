"""Request logging for operators: the reasons of rejections, and an access log."""

import logging
from contextvars import ContextVar
from typing import Final

from aiohttp import web

from pysync import protocol
from pysync.errors import PysyncError
from pysync.server.responses import Response

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
        if self.logs_requests:
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
