"""Reports of corrupt objects, which are logged and counted."""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Literal

from pysync.errors import DocumentCorrupt

log = logging.getLogger("pysync.corruption")

METRIC: Final = "pysync_corrupt_objects"

Kind = Literal["document", "log", "file"]
FoundBy = Literal["request", "scrub"]


class CorruptionReporter:
    """Reports the corrupt objects that this process finds. `count(metric, *labels)` increments the metric,
    `collections_of` returns the names of the collections that a key belongs to, and `remember("damage",
    **facts)` keeps the report for operators."""

    def __init__(
        self,
        count: Callable[..., None] = lambda *labels: None,
        collections_of: Callable[[str], Sequence[str]] = lambda key: (),
        remember: Callable[..., None] = lambda what, /, **facts: None,
    ) -> None:
        self._count = count
        self._collections_of = collections_of
        self._remember = remember

    def report(self, kind: Kind, key: str, why: str, found_by: FoundBy = "request") -> None:
        """Log and count the corrupt object at `key`."""
        self._count(METRIC, kind, found_by)
        self._remember("damage", kind=kind, key=key, why=why, foundBy=found_by)
        names = ", ".join(self._collections_of(key)) or "no collection"
        log.error("the %s at %r (%s) is corrupt: %s", kind, key, names, why)

    def report_once(self, error: DocumentCorrupt, kind: Kind, key: str) -> None:
        """Report the corrupt object that a request found at `key`, once for each `error`."""
        if error.key is None:
            error.key = key
            self.report(kind, key, error.detail)

    def reporting(self, kind: Kind, key: str) -> "_Reporting":
        """Return a context manager that reports the DocumentCorrupt that its block raises."""
        return _Reporting(self, kind, key)


class _Reporting:
    """The context manager of `reporting`. A generator would cost three times as much on every read."""

    __slots__ = ("_key", "_kind", "_reporter")

    def __init__(self, reporter: CorruptionReporter, kind: Kind, key: str) -> None:
        self._reporter = reporter
        self._kind = kind
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DocumentCorrupt):
            self._reporter.report_once(error, self._kind, self._key)
