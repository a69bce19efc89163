"""The native core: pure functions over bytes. No I/O, no clock, no randomness; it never calls back.

Errors are the classes of `pysync.errors`, raised from here.
"""

from collections.abc import Sequence
from typing import final

__all__ = [
    "SOURCE_DIGEST",
    "VERSION",
    "Append",
    "BatchAnswer",
    "BatchPlan",
    "BatchPlanner",
    "Document",
    "EventColumns",
    "LogHead",
    "LogNode",
    "PanicException",
    "PublicKey",
    "PushBody",
    "ReplayWindow",
    "RevocationList",
    "Revoked",
    "Scope",
    "canonicalize",
    "content_hash",
    "decode_append",
    "decode_push",
    "is_document",
    "is_log",
    "open_certificate",
    "read_document",
    "request_message",
    "verify_author",
    "verify_request",
]

SOURCE_DIGEST: str
"""SHA-256 of `rust/*.rs` as they were when this module was built."""

VERSION: str
"""The version of pysync, from `Cargo.toml`."""

def canonicalize(text: bytes) -> bytes:
    """The canonical JSON text of `text`: keys by code point, last duplicate
    wins, ECMAScript numbers, nothing dropped.

    Raises:
        InvalidJson: not UTF-8 JSON, a NaN or Infinity token, a lone surrogate, a number beyond a double.
        BodyTooDeep: nesting over 64.

    See docs/reference/protocol.md#canonical-json.
    """

def content_hash(text: bytes) -> str:
    """Hex SHA-256 of `canonicalize(text)`. Raises as it does."""

class PanicException(BaseException):
    """The core has met a case that it is not made for. Its state is as it was; nobody else is affected."""

@final
class PushBody:
    """A push body, decoded, sanitised and hashed in one pass."""

    @property
    def hash(self) -> str:
        """Hex SHA-256 of `canonical`."""
    @property
    def base_hash(self) -> str | None:
        """`baseHash`, None where it is null or absent."""
    @property
    def author_pubkey(self) -> str | None:
        """`authorPubkey`, None where it is absent or null."""
    @property
    def author_signature(self) -> str | None: ...
    @property
    def data(self) -> bytes:
        """`data` as it is stored and sent back: sanitised, and canonical but for the integers of 64 bits
        (signed or not), which keep all their digits. Longer ones and floats are canonical doubles."""
    @property
    def canonical(self) -> bytes:
        """The canonical text of `data`, sanitised: what is hashed, and what an author signs."""
    def rebased(self, base_hash: str) -> PushBody:
        """The same push over another base."""
    def stored(self, ts_ms: int, mark: bytes = ...) -> bytes:
        """The object to store: `{"v":1,"ts":..,"hash":"..","authorPubkey"?,"authorSignature"?,"data":..,
        "xxh3":".."}` and `mark`, which is white space. The checksum covers all else, `mark` too."""

def decode_push(body: bytes) -> PushBody:
    """Decode a push body. Unknown members are ignored; the five unsafe keys are
    dropped from objects, but not inside arrays.

    Raises:
        InvalidJson, BodyTooDeep: as `canonicalize`; the body's own object is nesting 1.
        BodyNotObject, InvalidData, InvalidBaseHash: in this order.
        AuthorProofMissing: `authorPubkey` or `authorSignature` without the other, or not a string.

    See docs/reference/protocol.md#push-a-document.
    """

@final
class Document:
    """A stored document, its parts located and not copied."""

    @property
    def hash(self) -> str: ...
    @property
    def ts_ms(self) -> int:
        """When it was written, in milliseconds since the epoch; 0 where the document does not say."""
    @property
    def author_pubkey(self) -> str | None: ...
    @property
    def author_signature(self) -> str | None: ...
    @property
    def data(self) -> bytes:
        """The text of `data` as it is stored."""
    def verify(self) -> bool:
        """Compare `hash` with the SHA-256 of the canonical `data`. The checksum only shows that nothing has
        changed since the document was stored."""
    def redacted(self, data: bytes, hash: str) -> bytes:
        """The object that would store a document with this `data` and `hash`, of the same time and without
        an author."""
    def answer(self, timestamp_ms: int, keyring: bytes | None = None) -> bytes:
        """The pull answer `{"data","hash","timestamp","authorPubkey"?,"authorSignature"?,"keyring"?}`.
        `keyring` is the JSON text of that member."""

def read_document(stored: bytes) -> Document:
    """Locate the parts of a stored document, verified by the rules of its layout: by its checksum; where it
    has none, as earlier versions wrote it, by its hash, and nothing around may differ from how they wrote
    it; in Starfish's, members in any order, by its hash, which is that of the log where `data` holds one.
    (The hash in the head of a log in chunks says nothing of that head.)

    Raises:
        DocumentCorrupt: not verified, or no document at all.
    """

def is_document(stored: bytes) -> bool:
    """True if these bytes were meant to be a document in a layout of ours, damaged or not."""

@final
class Append:
    """An append body, decoded and sanitised in one pass. Its length is that of `data`, in bytes."""

    @property
    def data(self) -> bytes:
        """`data` as it is stored and sent back, like `PushBody.data`."""
    @property
    def canonical(self) -> bytes:
        """The canonical text of `data`: what is hashed, and what an author signs."""
    @property
    def ts_ms(self) -> int | None:
        """`ts`, None where it is absent or null."""
    @property
    def author_pubkey(self) -> str | None:
        """`authorPubkey`, unverified; None unless both it and `authorSignature` are strings."""
    @property
    def author_signature(self) -> str | None: ...
    def __len__(self) -> int: ...

def decode_append(body: bytes) -> Append:
    """Decode an append body. Unknown members, `baseHash` among them, are ignored.

    Raises:
        InvalidJson, BodyTooDeep, BodyNotObject, InvalidData: as `decode_push`.
        InvalidTs: `ts` is no integer, or negative. One beyond 64 bits is taken for the largest.

    See docs/reference/protocol.md#append-an-element.
    """

def is_log(stored: bytes) -> bool:
    """Whether these bytes are an object of a log of ours, sound or not."""

@final
class LogNode:
    """Where elements of a log lie outside its head: a segment (level 0), or a block of the index."""

    @property
    def name(self) -> str:
        """The last part of its object's key."""
    @property
    def level(self) -> int: ...
    @property
    def start(self) -> int:
        """The position of the first element, counted from 0."""
    @property
    def end(self) -> int:
        """The position after the last element."""
    @property
    def ts_ms(self) -> int:
        """The first element's."""

@final
class LogHead:
    """What is known of a log without its segments: its count, hash and index, and its newest elements, the
    tail. It does not change: an append, or sealing the tail, gives another.

    Bounds of a read are the elements with a ts above `since`, of those the `newest` n or else the `oldest` n;
    None stands for all.
    """

    def __new__(cls, id: str, previous: str | None = None) -> LogHead:
        """An empty log. `id` (hex) is in the keys of its objects and belongs to no other log; `previous` is
        that of an expired log at the same key, whose objects are still to be deleted."""
    @staticmethod
    def read(stored: bytes, field: str) -> LogHead:
        """The log whose head these bytes are, or which Starfish wrote as one document with its elements in
        `data.<field>`; that one has no id. Raises DocumentCorrupt."""
    @property
    def is_chunked(self) -> bool:
        """Whether Starfish keeps the elements in chunks: then this head has none, and `gather` is the log."""
    def gather(self, chunks: list[bytes], *, whole: bool = False) -> LogHead:
        """The log with the elements of these chunks, in order, the newest chunk among them; `whole`: all
        chunks. Raises DocumentCorrupt, also where `whole` ones hold less than the head knows of."""
    def adopted(self, id: str) -> LogHead:
        """The log under an id of ours."""
    def without_previous(self) -> LogHead: ...
    @property
    def id(self) -> str:
        """Empty of a log that Starfish wrote."""
    @property
    def previous(self) -> str | None: ...
    @property
    def count(self) -> int: ...
    @property
    def ts_ms(self) -> int | None:
        """The newest element's, None of an empty log."""
    @property
    def written_ms(self) -> int:
        """When the head was written, 0 of an empty log; `ttlMs` counts from here."""
    @property
    def hash(self) -> str:
        """SHA-256 of `{"last":<the last element's data>,"n":<count>}`; `""` of an empty log."""
    @property
    def beside(self) -> str:
        """The members that lie in `data` beside the elements, as a JSON object; `""` for none."""
    @property
    def size(self) -> int:
        """About how many bytes `stored` has, rather too many than too few."""
    @property
    def tail_count(self) -> int: ...
    def append(
        self, elements: list[tuple[Append, str]], now_ms: int, max_count: int | None
    ) -> tuple[LogHead, list[tuple[str, int] | str]]:
        """The log with those of the elements that it admits, in order; and for each of them the log's hash
        after it and its time, or the code of its refusal: `ts_too_far_ahead`, `append_limit_exceeded` or
        `non_monotonic_timestamp`. The text beside an element (hex) is what `written` knows it by, `""` for
        nothing. The log must have an id."""
    def seal(self, max_bytes: int) -> tuple[LogHead, list[tuple[str, bytes]]]:
        """The log with an empty tail, and what must be stored before its next head, by name: segments of at
        most `max_bytes`, or one element, and blocks of the index. A name is never given to other bytes."""
    def stored(self) -> bytes:
        """The head object."""
    def nodes(
        self, since: int | None = None, newest: int | None = None, oldest: int | None = None
    ) -> list[LogNode]:
        """What is to be read, beside the tail, for the elements within these bounds, in the log's order."""
    def expand(
        self,
        block: bytes,
        node: LogNode,
        since: int | None = None,
        newest: int | None = None,
        oldest: int | None = None,
    ) -> list[LogNode]:
        """The same of what lies below a node above level 0. Raises DocumentCorrupt."""
    def slice(
        self,
        segments: list[tuple[LogNode, bytes]],
        with_tail: bool,
        since: int | None = None,
        newest: int | None = None,
        oldest: int | None = None,
    ) -> bytes:
        """The text of the elements within these bounds that lie in the segments, which follow each other, and
        in the tail, with commas between them. Raises DocumentCorrupt."""
    def written(self, mark: str, segments: list[tuple[LogNode, bytes]]) -> tuple[str, int] | None:
        """What `append` answered for the element with this mark, if it is in the tail or one of the segments.
        Raises DocumentCorrupt."""

@final
class PublicKey:
    """An Ed25519 public key, ready to verify with."""

    def __new__(cls, key: str) -> PublicKey:
        """From 64 lower-case hex digits. Raises ValueError for other text, for points that are not on the
        curve or not in their shortest encoding, and for small-order keys."""
    @property
    def hex(self) -> str: ...
    @property
    def user_id(self) -> str:
        """The first 32 hex digits of SHA-256 over the key's 32 bytes."""
    def verify(self, message: bytes, signature: str) -> bool:
        """Whether `signature` (strict padded base64 of 64 bytes) is this key's over `message`."""

@final
class RevocationList:
    """A revocation list of one issuer. Neither its signature nor its entries are checked before asked for."""

    @staticmethod
    def parse(text: bytes) -> RevocationList | None:
        """The list of a JSON text; None where issuer, generation or the list itself are missing or wrong."""
    @property
    def iss(self) -> str: ...
    @property
    def iss_user_id(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def text(self) -> bytes:
        """Its canonical JSON."""
    def is_signed(self) -> bool:
        """Verify the issuer's signature. Costs one Ed25519 verification."""
    def revoked(self) -> Revoked | None:
        """The entries of the list; None if one is malformed."""

@final
class Revoked:
    """The entries of a revocation list, as digests: some 20 bytes each. Its length is their number."""

    @property
    def last_expiry_s(self) -> int:
        """When the last entry expires, in seconds since the epoch; -2**63 where there is none."""
    def contains(self, subject: str, nonce: str) -> bool:
        """True if the list revokes the certificate of `subject` (`""`: of an audience) with this nonce, or
        everything that `subject` holds."""
    def __len__(self) -> int: ...

def open_certificate(text: bytes) -> tuple[str, int, int] | None:
    """The subject (`""` for an audience certificate), `nbf` and `exp` of a certificate (JSON) that its issuer
    signed; None where nobody did. Costs one Ed25519 verification; the certificate's form is not checked
    beyond these members."""

def request_message(method: str, target: str, body: bytes, host: str, ts_ms: int, nonce: str) -> bytes:
    """What a request signature signs (docs/reference/protocol.md#request-signature)."""

def verify_request(
    key: PublicKey,
    signature: str,
    method: str,
    targets: list[str],
    body: bytes,
    host: str,
    ts_ms: int,
    nonce: str,
) -> bool:
    """Whether `signature` is `key`'s over the request, with any of `targets` as its path, tried in order.
    Texts that hold surrogates, as header values that are not UTF-8 do, verify as nothing."""

def verify_author(
    tag: str, document_key: str, data: bytes, author_pubkey: str, author_signature: str
) -> bool:
    """Whether the author proof holds: `tag` is `starfish-doc-author-v1` or `starfish-append-author-v1`,
    `data` canonical text. A malformed key or signature is False.

    See docs/reference/protocol.md#author-proofs.
    """

@final
class Scope:
    """The paths of a certificate, compiled (docs/reference/protocol.md#path-scopes)."""

    def __new__(cls, paths: list[str], identity: str) -> Scope:
        """`{identity}` in an entry stands for `identity`; a leading `!` makes it a deny."""
    def allows(self, document_key: str) -> bool:
        """Whether an allow entry matches and no deny entry does: denies cover descendants and are read
        widely. No entries allow everything. The key comes decoded; empty and `.` segments do not count."""
    @property
    def has_denies(self) -> bool:
        """True if there is a deny entry."""
    def undenied(self, prefix: str, names: list[str]) -> list[str]:
        """Return the names whose keys (`prefix` and the name) no deny entry covers."""

@final
class BatchPlanner:
    """The collections of one namespace, ready to plan batch pulls over.

    See docs/reference/protocol.md#batch-pull.
    """

    def __new__(
        cls,
        rows: list[tuple[str, str, bool, bool, int | None, list[str], int | None]],
        max_reads: int,
        max_append_elements: int,
        deny_suffixes: list[str],
    ) -> BatchPlanner:
        """A row is a collection: its name; its storagePath; whether batches serve it; whether the caller's
        scope counts; its `ttlMs`; the parameters whose values, beside `{identity}`, decide who may read; and
        None where it is no log, else how many elements a read returns at most (0: as many as it asks for).

        `max_reads` bounds the names of a batch as well as its reads. No batch may ask for a name, or a key's
        last segment, that is one of `deny_suffixes`.
        """
    def plan(self, query: bytes, identity: str, scope: Scope | None = None) -> BatchPlan:
        """What the query of a batch pull asks for, as received. `identity` stands for an `{identity}` that is
        not given (`""`: nobody's), and keys outside `scope` are `Forbidden`.

        Raises:
            MissingCollections, InvalidParams, InvalidAppendParams: parameters that are not there or have
                another shape.
            BatchKeyDenied: a name that is a denied suffix, or a key that ends in one.
            TooManyCollections, BatchAppendBudgetExceeded
        """

@final
class BatchPlan:
    """What a batch pull asks for: entries in its order, each an error already, a document or a log."""

    @property
    def collections(self) -> list[int]:
        """The rows that are named, each once."""
    @property
    def groups(self) -> list[tuple[int, str | None, list[str]]]:
        """What is decided on together: a row, the `{identity}` of the path, and the values of the row's
        deciding parameters in the order of its storagePath."""
    @property
    def reads(self) -> list[tuple[str, int]]:
        """Keys of documents to read, each with the group that decides on it, no pair twice. A key is in two
        groups only where two collections hold it."""
    @property
    def tails(self) -> list[tuple[str, int, int | None, int | None, int | None]]:
        """Logs to read, none twice: key, group, `since`, `newest` and `oldest`. Asked for are the elements
        with a time above `since`, of those the `newest` or else the `oldest`; all three are None where the
        request names no bound. The counts are within what a read may return."""
    @property
    def times(self) -> tuple[list[int], list[int]]:
        """The number of times that the answer sends each of `reads`, and each of `tails`."""
    def answer(
        self,
        stored: Sequence[bytes | tuple[str, int] | str | None],
        now_ms: int,
        variant: bytes | None = None,
        tails: list[tuple[str, bytes, bool] | str] | None = None,
    ) -> BatchAnswer:
        """The answer, where `stored` says of each of `reads` what the store holds: bytes, None for nothing,
        or the text of an error. A document's hash and time may stand in for its bytes: then the answer has an
        ETag and no `body`. Bytes that are no document are `document_corrupt`, and a document that has
        outlived its `ttlMs` is missing. `variant` tells apart answers to callers who see different parts.
        `tails` says of each of `self.tails` what became of it: the log's hash, the text of `data` and whether
        elements were left out, or the text of an error; it may be left out where there are none.

        Raises ValueError where `stored` has another length than `reads`, or `tails` than `self.tails`.
        """

@final
class BatchAnswer:
    @property
    def etag(self) -> str:
        """16 hex digits of XXH3 over the names, keys, bounds, hashes and errors of the entries, and the
        variant."""
    @property
    def failed(self) -> bool:
        """Whether any entry is an error."""
    @property
    def versions(self) -> list[tuple[str, int] | None]:
        """Hash and time of each document that was read."""
    @property
    def corrupt(self) -> list[str]:
        """The keys of `reads` at which the bytes are no document."""
    def body(self) -> bytes:
        """`{"collections":{name:[entry..]}}`, an entry being a pull's answer or `{"error":text}`. Raises
        ValueError where the bytes of a document are missing."""

@final
class ReplayWindow:
    """A set of (key, nonce) pairs at 19 to 39 bytes each (36 at a million). Not bound to a time: its owner
    drops it whole. Digests of another length than 16 bytes raise ValueError."""

    def __new__(cls) -> ReplayWindow: ...
    @staticmethod
    def digest(presenter: str, nonce: str) -> bytes:
        """The 16 bytes that stand for a pair."""
    def add(self, digest: bytes) -> bool:
        """Remember one digest (16 bytes); False when it was there."""
    def extend(self, digests: bytes) -> None:
        """Remember many, laid end to end; a rest shorter than 16 bytes is ignored."""
    def __contains__(self, digest: bytes, /) -> bool: ...
    def __len__(self) -> int: ...

@final
class EventColumns:
    """The events of a batch as columns of text. Its length is how many events there are.

    See docs/reference/protocol.md#events.
    """

    def __new__(cls, data: bytes) -> EventColumns:
        """Of `data` as `PushBody.data` has it, with the array `events`; other members do not count.

        Raises:
            InvalidEvents: no `events`, none in it, or one that is no object. Or more than 2 GiB.
        """
    def __len__(self) -> int: ...
    def column(self, at: int) -> tuple[bytes, bytes]:
        """The texts of a column end to end, behind their offsets: little-endian integers of 32 bits, 0 and
        the end of each. A string is its characters, null or nothing is empty, any other value its JSON text.

        Columns 0 to 8 are event_type, event, distinct_id, anonymous_id, ts, message_id, properties, context
        and dt. Column 9 is `extra`: the other members of each event as one object, empty where there are
        none; `received_at` is left out, which only the server says. Raises IndexError beyond it."""
