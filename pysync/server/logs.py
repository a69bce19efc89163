"""Logs: text on a terminal, one JSON object a line elsewhere. Never a body, a key or a token."""

import logging
import sys
from datetime import UTC, datetime

import orjson


def configure(*, human: bool | None = None, level: int = logging.INFO) -> None:
    """Send everything to standard error, in the form that suits it unless `human` says which."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty() if human is None else human:
        handler.setFormatter(HumanFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    else:
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class HumanFormatter(logging.Formatter):
    """A record as text, with the id of the request that it is about."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        request_id = getattr(record, "request_id", None)
        text = super().formatMessage(record)
        return text if request_id is None else f"{text} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            entry["requestId"] = request_id
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()
