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

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from pysync._core import Scope

ANONYMOUS_ROLES = frozenset({"public"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, as far as authentication could tell.

    `presenter` is the Ed25519 key (hex) that signed it, `""` where nothing was signed. `ops` are the
    certificate's operations and `scope` its paths, each None where no certificate limits the caller.
    """

    identity: str = ""
    roles: frozenset[str] = ANONYMOUS_ROLES
    presenter: str = ""
    ops: frozenset[str] | None = None
    scope: Scope | None = None


ANONYMOUS = Caller()


@dataclass(frozen=True, slots=True)
class Written:
    """What a push or an append answers: the hash of the document or log now, and the time of the write."""

    hash: str
    timestamp_ms: int


@dataclass(frozen=True)
class WriteEvent:
    """A successful push, as plugins and projections are told of it (service, Write event). `text` is the
    pushed `data` as JSON, of an append its element's; None where it was no JSON. `identity` is the writer's,
    None for nobody."""

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
