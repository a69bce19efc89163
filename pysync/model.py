"""Small immutable values that all parts use. docs/reference/glossary.md defines the terms."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import orjson

from pysync._core import Scope
from pysync.errors import QuotaExceeded

Observe = Callable[..., None]
"""Adds a value to a histogram of the metrics: takes its name, the value, and the values of its labels."""


def unobserved(metric: str, value: float, *labels: str) -> None:
    """Observe nothing."""


ANONYMOUS_ROLES = frozenset({"public"})


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings about the server of a store or coordinator: the write preconditions that it ignores, and the
    milliseconds by which this machine's clock is ahead of the server's (None if they share one)."""

    ignored_conditions: Sequence[str] = ()
    skew_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """The roles that a certificate gives its presenter, before trust in its issuer is decided. `own` apply
    regardless of the issuer, `yielded` only if `issuer` is trusted, and `shared` only below the user id of
    the issuer."""

    issuer: str
    issuer_id: str
    own: frozenset[str]
    yielded: frozenset[str]
    shared: frozenset[str] = frozenset()

    def roles(
        self, identity: str, issuers: frozenset[str] | None, identity_roles: Mapping[str, tuple[str, ...]]
    ) -> frozenset[str]:
        """Return the roles of `identity` if `issuers` are trusted (None: all), with its `identity_roles`."""
        roles = self.own.union(identity_roles.get(identity, ()))
        return roles | self.yielded if issuers is None or self.issuer in issuers else roles


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated caller of a request.

    `roles` are those that the server's own trust gives; `AccessPolicy.trusted_roles` returns those of one
    collection. `presenter` is the Ed25519 key (hex) that signed the request, `""` if it is unsigned. `ops`
    are the certificate's operations and `scope` its paths, each None if no certificate limits the caller.
    `claims` are the certificate's, and `given` are the roles that a space or plugins give for this request
    alone.
    """

    identity: str = ""
    roles: frozenset[str] = ANONYMOUS_ROLES
    presenter: str = ""
    ops: frozenset[str] | None = None
    scope: Scope | None = None
    claims: Claims | None = None
    given: frozenset[str] = frozenset()


ANONYMOUS = Caller()


class WriteResult(NamedTuple):
    """The outcome of a push or append: the new hash of the document or log, and the time of the write."""

    hash: str
    timestamp_ms: int


class Usage(NamedTuple):
    """Amounts of stored data. `bytes` includes the objects of logs, `documents` does not."""

    bytes: int = 0
    documents: int = 0
    log_elements: int = 0
    files: int = 0

    def plus(self, other: Iterable[int]) -> Self:
        """Return the sum."""
        return type(self)(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other: Iterable[int]) -> Self:
        """Return the difference."""
        return type(self)(*(mine - its for mine, its in zip(self, other, strict=True)))

    def as_json(self) -> dict[str, int]:
        """Return the amounts by their names in responses."""
        return dict(zip(USAGE_NAMES, self, strict=True))


USAGE_NAMES: Final = ("bytes", "documents", "logElements", "files")
"""The names of the amounts in responses and the configuration, in the order of `Usage`."""

QuotaLimit = tuple[float, float, float, float]
"""The greatest amount of each kind, in the order of `Usage`; `inf` for no limit."""
QuotaLimits = Mapping[str, QuotaLimit]
"""The limit of each subject, by its kind."""


def check_limit(kind: str, limit: QuotaLimit, used: Sequence[int], more: Sequence[int]) -> None:
    """Raise QuotaExceeded if a subject that uses `used` may not use `more`. Less is always allowed."""
    for name, most, now, added in zip(USAGE_NAMES, limit, used, more, strict=True):
        if added > 0 and now + added > most:
            raise QuotaExceeded(kind, name, now, int(most))


@dataclass(frozen=True)
class WriteEvent:
    """A successful push, as plugins and projections receive it. `text` is the pushed `data` as JSON, or an
    append's element; None if it is not JSON. `identity` is the writer's, None if there is none. `removed`
    is True for a removal: the hash is that of the removed version, and the data is empty for projections,
    None for plugins.

    See docs/reference/plugins.md#after_write.
    """

    collection: str
    params: Mapping[str, str]
    hash: str
    timestamp: int
    text: bytes | None = field(default=None, repr=False)
    identity: str | None = None
    namespace: str | None = None
    removed: bool = False

    @cached_property
    def body(self) -> Mapping[str, Any] | None:
        """The pushed `data`, parsed on first use. All receivers share it, so it must not be modified."""
        return None if self.text is None else orjson.loads(self.text)
