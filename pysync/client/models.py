"""Values of the client: parameters, results, and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import Any

import orjson

from pysync.errors import PysyncError, from_batch_error
from pysync.model import USAGE_NAMES, Usage


def encode(value: Any, options: int = 0) -> bytes:
    """Return `value` as JSON. Raises TypeError for values that JSON cannot represent, and ValueError with the
    position of NaN and infinite numbers, which orjson would write as null."""
    text = orjson.dumps(value, option=options)
    if b"null" in text:
        for path in _non_finite(value):
            raise ValueError(f"JSON has no NaN and no infinite numbers: {path or 'the value'} is one")
    return text


def _non_finite(value: Any, path: str = "") -> Iterator[str]:
    """Yield the positions of all NaN and infinite numbers in a value that orjson can serialise."""
    if isinstance(value, float):
        if not isfinite(value):
            yield path
    elif isinstance(value, dict):
        for name, member in value.items():
            yield from _non_finite(member, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for at, element in enumerate(value):
            yield from _non_finite(element, f"{path}[{at}]")
    elif isinstance(value, Enum):
        yield from _non_finite(value.value, path)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _non_finite(getattr(value, each.name), f"{path}.{each.name}" if path else each.name)


ParamSet = Mapping[str, str | int]
RangeParams = Mapping[str, int]
"""The bounds of one log in a batch: `since` or `last` or both."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """The part of a log that a batch reads: the log's path parameters, and `since` or `last` or both, as for
    `Client.pull`.

    With `since` alone a server returns the *oldest* elements after it, up to its limit (`maxPullLimit`, or
    1000). Request the rest with the timestamp of the newest one as `since`, until none come.
    """

    params: ParamSet = field(default_factory=dict)
    since: int | None = None
    last: int | None = None

    @property
    def bounds(self) -> RangeParams:
        """Return `since` and `last` as a batch request names them."""
        named = {"since": self.since, "last": self.last}
        return {name: value for name, value in named.items() if value is not None}


def pull_query(since: int | None, last: int | None, full: bool) -> dict[str, str]:
    """Return the query string of a single pull; empty without bounds. Raises ValueError for bounds that every
    server rejects."""
    if full and (since is not None or last is not None):
        raise ValueError("full is all of a log: it excludes since and last")
    _check("since", since)
    _check("last", last)
    query = {"checkpoint": since, "last": last, "full": "true" if full else None}
    return {name: str(value) for name, value in query.items() if value is not None}


def check_append_params(append_params: Mapping[str, Sequence[RangeParams | None]]) -> None:
    """Raise ValueError for bounds that every server rejects."""
    for bounds in append_params.values():
        for entry in bounds:
            for name, value in (entry or {}).items():
                if name not in ("since", "last", "limit"):
                    raise ValueError(f"in a batch since and last bound a log, not {name}")
                _check(name, value)


def _check(name: str, value: int | None) -> None:
    # A bool is an int to Python and none to a server.
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{name} must be a whole number, 0 or more")


@dataclass(frozen=True, slots=True)
class LogElement:
    """An element of a log. `ts_ms` is its timestamp, greater than those of all elements before it. The author
    is as the server reports it; `LogCursor` verifies it."""

    ts_ms: int
    data: dict[str, Any]
    author_pubkey: str | None = None
    author_signature: str | None = None


@dataclass(frozen=True, slots=True)
class DocumentVersion:
    """A version of a document in a collection with `history`. `timestamp_ms` is the time of its push, and
    `replaced_ms` when it was replaced or deleted, None for the current version. `size` is that of its data in
    bytes. `identity` is the user who pushed it, None if unknown."""

    hash: str
    timestamp_ms: int
    size: int
    replaced_ms: int | None = None
    identity: str | None = None
    author_pubkey: str | None = None


def versions(body: dict[str, Any]) -> list[DocumentVersion]:
    """Return the versions in the response of the history route."""
    return [
        DocumentVersion(
            each["hash"],
            each["timestamp"],
            each["size"],
            each.get("replaced"),
            each.get("identity"),
            each.get("authorPubkey"),
        )
        for each in body["versions"]
    ]


@dataclass(frozen=True, slots=True)
class PullResult:
    """A document as the server stores it. `hash` is `""` and `data` empty if nothing is stored.
    `timestamp_ms` is the time of the pull. `keyring` is None if it was not requested, is not stored, or may
    not be read. `has_more` is True if the server left out elements of a log that are newer than those in
    `data`. `unchanged` is True for an entry of a batch that is still the `known` version, and has no `data`.
    """

    data: dict[str, Any]
    hash: str
    timestamp_ms: int
    author_pubkey: str | None = None
    author_signature: str | None = None
    keyring: "PullResult | None" = None
    has_more: bool = False
    unchanged: bool = False

    def elements(self, field: str | None = "items") -> list[LogElement]:
        """Return the elements of a pulled log, in its order. `field` is the name of the array that holds
        them, None if it is not known. Raises ValueError if the stored data has no such array."""
        field = next(iter(self.data), "") if field is None else field
        found = self.data.get(field, () if self.hash else [])
        try:
            if isinstance(found, list):
                return [_element(as_object(element)) for element in found]
        except (KeyError, TypeError):
            pass
        raise ValueError(f"what is stored is no log with its elements in {field!r}")


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """The amounts that are stored for an identity or a space, and its limits, by their names: `bytes`,
    `documents`, `logElements`, `files`."""

    used: Usage
    allowed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The usage of the caller and of the spaces that it belongs to. `is_complete` is False while the server
    still counts what was stored before it had quotas."""

    identity: str
    own: QuotaUsage
    spaces: Mapping[str, QuotaUsage]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class PushResult:
    """An applied push. `hash` is the base of the next one. For an append, `timestamp_ms` is the timestamp of
    its element and `hash` that of the log; for a batch of events, `batch_id` is the name of its file."""

    hash: str
    timestamp_ms: int
    batch_id: str | None = None


BatchEntry = PullResult | PysyncError
"""An entry of a batch: the document, or the error that a single pull would raise."""


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """The description of a collection. `append_only` is its log configuration; None if it is not a log."""

    name: str
    max_body_bytes: int
    encryption: str
    allowed_mime_types: tuple[str, ...]
    pull_only: bool = False
    push_only: bool = False
    append_only: Mapping[str, Any] | None = None
    ttl_ms: int | None = None
    force_full_fetch: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The collections that a server describes to the caller: at its root, and by namespace."""

    collections: tuple[CollectionInfo, ...]
    namespaces: Mapping[str, tuple[CollectionInfo, ...]]


def as_object(body: Any) -> dict[str, Any]:
    """Return the members of a JSON object. Raises TypeError for anything else."""
    if not isinstance(body, dict):
        raise TypeError("not a JSON object")
    return body


def pull_result(body: dict[str, Any]) -> PullResult:
    """Decode the response to a pull."""
    keyring = body.get("keyring")
    return PullResult(
        data=as_object(body["data"]),
        hash=body["hash"],
        timestamp_ms=body["timestamp"],
        author_pubkey=body.get("authorPubkey"),
        author_signature=body.get("authorSignature"),
        keyring=None if keyring is None else pull_result(as_object(keyring)),
        has_more=body.get("hasMore") is True,
    )


def push_result(body: dict[str, Any]) -> PushResult:
    """Decode the response to a push."""
    return PushResult(body["hash"], body["timestamp"], body.get("batchId"))


def file_result(body: dict[str, Any]) -> PushResult:
    """Decode the response to the push of a file. Other servers may omit its timestamp, which is then 0."""
    return PushResult(hash=body["hash"], timestamp_ms=body.get("timestamp", 0))


def bundle_result(body: dict[str, Any]) -> dict[str, PullResult]:
    """Decode the response to the pull of a bundle."""
    timestamp_ms = body["timestamp"]
    return {
        name: PullResult(as_object(member["data"]), member["hash"], timestamp_ms)
        for name, member in as_object(body["collections"]).items()
    }


def batch_result(body: dict[str, Any]) -> dict[str, list[BatchEntry]]:
    """Decode the response to a batch pull."""
    return {
        name: [_entry(as_object(entry)) for entry in entries]
        for name, entries in as_object(body["collections"]).items()
    }


def list_page(body: dict[str, Any]) -> tuple[list[tuple[str, str | None]], bool]:
    """Decode one page of a list: names with the digits of their hashes, and True if there are more."""
    names = list(body["items"])
    hashes = body.get("hashes", [None] * len(names))
    return list(zip(names, hashes, strict=True)), bool(body["hasMore"])


def server_config(body: dict[str, Any]) -> ServerConfig:
    """Decode a manifest."""
    spaces = as_object(body.get("namespaces", {}))
    return ServerConfig(
        collections=_infos(body),
        namespaces={name: _infos(space) for name, space in spaces.items()},
    )


def _element(members: dict[str, Any]) -> LogElement:
    return LogElement(
        ts_ms=members["ts"],
        data=as_object(members["data"]),
        author_pubkey=members.get("authorPubkey"),
        author_signature=members.get("authorSignature"),
    )


def _entry(entry: dict[str, Any]) -> BatchEntry:
    if entry.get("unchanged") is True:
        return PullResult({}, entry["hash"], entry["timestamp"], unchanged=True)
    return from_batch_error(entry["error"]) if "error" in entry else pull_result(entry)


def _infos(body: dict[str, Any]) -> tuple[CollectionInfo, ...]:
    return tuple(
        CollectionInfo(
            name=info["name"],
            max_body_bytes=info["maxBodyBytes"],
            encryption=info["encryption"],
            allowed_mime_types=tuple(info["allowedMimeTypes"]),
            pull_only=info.get("pullOnly", False),
            push_only=info.get("pushOnly", False),
            append_only=info.get("appendOnly"),
            ttl_ms=info.get("ttlMs"),
            force_full_fetch=info.get("forceFullFetch", False),
        )
        for info in body["collections"]
    )


def usage_report(body: dict[str, Any]) -> UsageReport:
    """Return the report of a response to `GET /usage`."""
    spaces = {name: _quota_usage(found) for name, found in body.get("spaces", {}).items()}
    return UsageReport(body["identity"], _quota_usage(body), spaces, bool(body["complete"]))


def _quota_usage(members: dict[str, Any]) -> QuotaUsage:
    return QuotaUsage(Usage(*(members["used"][name] for name in USAGE_NAMES)), members["allowed"])
