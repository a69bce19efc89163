"""Request logging for operators: the reasons of refusals, and an access log."""

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
"""Statuses whose reason only the operator learns."""

identity_var: ContextVar[str] = ContextVar("identity", default="")
"""The identity whose signature or token the current request carries. Set if there is an access log."""


class RequestLog:
    """The lines that a service logs of its requests. `logs_refusals`: at the level `info`, else `debug`;
    `logs_requests`: there is an access log. `request_id` is the variable in which the id of a request is
    kept while it is answered."""

    def __init__(
        self, request_id: ContextVar[str | None], *, logs_refusals: bool = False, logs_requests: bool = False
    ) -> None:
        self._request_id = request_id
        self._level = logging.INFO if logs_refusals else logging.DEBUG
        self.logs_requests = logs_requests

    @property
    def needs_id(self) -> bool:
        """True if handlers may log, and so must know the id of their request."""
        return self._level == logging.INFO or REFUSALS.isEnabledFor(self._level)

    def reset_identity(self) -> None:
        """Forget who sent the last request of this connection."""
        identity_var.set("")

    def set_identity(self, identity: str) -> None:
        """Note who sends the request that is being answered."""
        if self.logs_requests:
            identity_var.set(identity)

    def log_rejection(self, request: web.BaseRequest, error: PysyncError, request_id: str) -> None:
        """Log which check a request failed, where refusals are logged and this one is to be explained."""
        self._log_failed_check("refused a request", request, error, request_id)

    def log_ignored_credentials(self, request: web.BaseRequest, error: PysyncError) -> None:
        """Log why a batch is answered as if it had no credentials."""
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
        """Log a request and its answer. `seconds` is how long the answer took to begin."""
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
