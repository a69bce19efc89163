"""The words of pysync, as small frozen values.

- *document key*: the resolved storagePath of a collection, and the key of the object that holds it.
- *caller*: who sends a request: an identity (a user id, `""` for anonymous) and the roles it holds.
- *certificate* (cap): a signed statement of an issuer that a key may act; its holder is the *presenter*.
- *hash*: SHA-256 of a document's canonical `data`; the version that clients name in `baseHash`.
- *etag*: the version that a store names; it differs for every write, equal bytes or not.
- *log*: an append-only document; its *elements* are counted from 0, their `ts` strictly increases.
- *head*: the object at a log's key: what is known of the whole log, and its newest elements, the *tail*.
- *segment*: an immutable object that holds older elements of a log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from pysync._core import Scope

ANONYMOUS_ROLES = frozenset({"public"})


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a store or coordinator knows of its server: the conditions of a write that it ignores, and how far
    this machine's clock is ahead of the server's, None if they share one."""

    ignored_conditions: Sequence[str] = ()
    skew_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Claims:
    """The roles that a certificate gives its presenter, before its issuer is known to be trusted. `own` are
    held whoever issued it, `yielded` only if `issuer` is trusted."""

    issuer: str
    own: frozenset[str]
    yielded: frozenset[str]

    def roles(
        self, identity: str, issuers: frozenset[str] | None, identity_roles: Mapping[str, tuple[str, ...]]
    ) -> frozenset[str]:
        """Return the roles of `identity` if `issuers` are trusted (None: all are) and `identity_roles` are
        given."""
        roles = self.own.union(identity_roles.get(identity, ()))
        return roles | self.yielded if issuers is None or self.issuer in issuers else roles


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, as far as authentication could tell.

    `roles` are those under the trust of the whole server; `AccessPolicy.trusted_roles` gives those of one
    collection. `presenter` is the Ed25519 key (hex) that signed the request, `""` if nothing was signed.
    `ops` are the certificate's operations and `scope` its paths, each None if no certificate limits the
    caller. `claims` are the certificate's, and `given` the roles held for this request alone, by a space or
    plugins.
    """

    identity: str = ""
    roles: frozenset[str] = ANONYMOUS_ROLES
    presenter: str = ""
    ops: frozenset[str] | None = None
    scope: Scope | None = None
    claims: Claims | None = None
    given: frozenset[str] = frozenset()


ANONYMOUS = Caller()


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a push or an append answers: the hash of the document or log now, and the time of the write."""

    hash: str
    timestamp_ms: int


@dataclass(frozen=True)
class WriteEvent:
    """A successful push, as plugins and projections are told of it. `text` is the
    pushed `data` as JSON, of an append its element's; None where it was no JSON. `identity` is the writer's,
    None for nobody.

    See docs/reference/plugins.md#after_write.
    """

    collection: str
    params: Mapping[str, str]
    hash: str
    timestamp: int
    text: bytes | None = field(default=None, repr=False)
    identity: str | None = None
    namespace: str | None = None

    @cached_property
    def body(self) -> Mapping[str, Any] | None:
        """The pushed `data`, parsed when it is first asked for. All that are told of the write share it: it
        is not to be changed."""
        return None if self.text is None else orjson.loads(self.text)
