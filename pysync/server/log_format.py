"""Log formats: text on a terminal, one JSON object per line elsewhere. Logs never contain bodies, secrets or
tokens."""

import json
import logging
import sys
from datetime import UTC, datetime

import orjson


def configure(*, human: bool | None = None, worker: int | None = None, level: str = "info") -> None:
    """Log records of this `level` and above to standard error. The format is text on a terminal and JSON
    elsewhere, unless `human` is given. Every line names the `worker`, if there are several."""
    handler = logging.StreamHandler(sys.stderr)
    if sys.stderr.isatty() if human is None else human:
        who = "" if worker is None else f"worker {worker}: "
        handler.setFormatter(HumanFormatter(f"%(asctime)s %(levelname)-7s {who}%(message)s", "%H:%M:%S"))
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
