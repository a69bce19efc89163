"""The native core: pure functions over bytes. It does no I/O, reads no clock, uses no randomness and never
calls back.

Its errors are the classes of `pysync.errors`.
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
    "encode_events",
    "is_document",
    "is_intact_log_object",
    "is_log",
    "open_certificate",
    "read_document",
    "request_message",
    "signed_time",
    "split_key",
    "verify_author",
    "verify_request",
    "verify_requests",
]

SOURCE_DIGEST: str
"""SHA-256 of the `rust/*.rs` from which this module was built."""

VERSION: str
"""Version of pysync, from `Cargo.toml`."""

def canonicalize(text: bytes) -> bytes:
    """Return the canonical JSON text of `text`: keys sorted by code point, the last
    of duplicates, ECMAScript numbers, nothing dropped.

    Raises:
        InvalidJson: not UTF-8 JSON, a NaN or Infinity token, a lone surrogate, a number beyond a double.
        BodyTooDeep: nesting over 64.

    See docs/reference/protocol.md#canonical-json.
    """

def content_hash(text: bytes) -> str:
    """Return the hex SHA-256 of `canonicalize(text)`. Raises as it does."""

class PanicException(BaseException):
    """The core met a case that it does not handle: a bug. Its state is unchanged, and other calls are not
    affected."""

@final
class PushBody:
    """A push body, decoded, sanitised and hashed in one pass."""

    @property
    def hash(self) -> str:
        """Hex SHA-256 of `canonical`."""
    @property
    def base_hash(self) -> str | None:
        """`baseHash`, None if it is null or absent."""
    @property
    def author_pubkey(self) -> str | None:
        """`authorPubkey`, None if it is absent or null."""
    @property
    def author_signature(self) -> str | None:
        """`authorSignature`, None if it is absent or null."""
    @property
    def data(self) -> bytes:
        """`data` as it is stored and sent back: sanitised, and canonical except that 64-bit integers (signed
        or not) keep all their digits. Longer ones and floats are canonical doubles."""
    @property
    def canonical(self) -> bytes:
        """The canonical text of `data`, sanitised: the text that is hashed, and that an author signs."""
    def rebased(self, base_hash: str) -> PushBody:
        """Return the same push with another base."""
    def stored(self, ts_ms: int, mark: bytes = ...) -> bytes:
        """Return the object to store:
        `{"v":1,"ts":..,"hash":"..","authorPubkey"?,"authorSignature"?,"data":.., "xxh3":".."}` and `mark`,
        which is white space. The checksum covers everything else, including `mark`."""

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
    """A stored document. Its parts are located, not copied."""

    @property
    def hash(self) -> str:
        """`hash` of the document."""
    @property
    def ts_ms(self) -> int:
        """Time of the write, in milliseconds since the epoch; 0 if the document does not contain it."""
    @property
    def author_pubkey(self) -> str | None:
        """`authorPubkey`, None if absent."""
    @property
    def author_signature(self) -> str | None:
        """`authorSignature`, None if absent."""
    @property
    def data(self) -> bytes:
        """The text of `data` as it is stored."""
    def verify(self) -> bool:
        """Return True if `hash` is the SHA-256 of the canonical `data`. The checksum only shows that nothing
        has changed since the document was stored."""
    def redacted(self, data: bytes, hash: str) -> bytes:
        """Return the object that would store a document with this `data` and `hash`, the same time and no
        author."""
    def answer(self, timestamp_ms: int, keyring: bytes | None = None) -> bytes:
        """Return the pull response
        `{"data","hash","timestamp","authorPubkey"?,"authorSignature"?,"keyring"?}`. `keyring` is the JSON
        text of that member."""

def read_document(stored: bytes) -> Document:
    """Locate the parts of a stored document, and verify it as its layout allows.

    A document of this version is verified by its checksum. One of an earlier version, which has none, is
    verified by its hash, and must otherwise have exactly the form that its version wrote. One that Starfish
    wrote, with members in any order, is verified by its hash, which is that of the log if `data` contains
    one. The hash in the head of a log in chunks does not cover that head, so it is not checked.

    Raises:
        DocumentCorrupt: the verification fails, or this is not a document.
    """

def is_document(stored: bytes) -> bool:
    """Return True if these bytes are a document in one of our layouts, damaged or not."""

def split_key(key: str) -> tuple[str, str]:
    """Return the parent (`""` at the top) and the name of a key of a store. Raises ValueError for an invalid
    key: one with an empty, `.` or `..` segment, a NUL, or a lone surrogate."""

@final
class Append:
    """An append body, decoded and sanitised in one pass. Its length is that of `data`, in bytes."""

    @property
    def data(self) -> bytes:
        """`data` as it is stored and sent back, like `PushBody.data`."""
    @property
    def canonical(self) -> bytes:
        """The canonical text of `data`: the text that is hashed, and that an author signs."""
    @property
    def ts_ms(self) -> int | None:
        """`ts`, None if it is absent or null."""
    @property
    def author_pubkey(self) -> str | None:
        """`authorPubkey`, not verified; None unless both it and `authorSignature` are strings."""
    @property
    def author_signature(self) -> str | None:
        """`authorSignature`, not verified; None unless both it and `authorPubkey` are strings."""
    def __len__(self) -> int: ...

def decode_append(body: bytes) -> Append:
    """Decode an append body. Unknown members, `baseHash` among them, are ignored.

    Raises:
        InvalidJson, BodyTooDeep, BodyNotObject, InvalidData: as `decode_push`.
        InvalidTs: `ts` is not an integer, or negative. One beyond 64 bits counts as the largest.

    See docs/reference/protocol.md#append-an-element.
    """

def is_intact_log_object(stored: bytes) -> bool:
    """Return True if the checksum of a head, a segment or a block of the index of a log matches."""

def is_log(stored: bytes) -> bool:
    """Return True if these bytes are an object of a log that pysync wrote, damaged or not."""

@final
class LogNode:
    """An object with elements of a log outside its head: a segment (level 0), or a block of the index."""

    @property
    def name(self) -> str:
        """The last part of the key of its object."""
    @property
    def level(self) -> int:
        """0 for a segment, higher for a block of the index."""
    @property
    def start(self) -> int:
        """The position of the first element, counted from 0."""
    @property
    def end(self) -> int:
        """The position after the last element."""
    @property
    def ts_ms(self) -> int:
        """Time of the first element."""
    @property
    def next_ts_ms(self) -> int | None:
        """Time of the first element after it; None if the tail follows and is empty."""

@final
class LogHead:
    """The head of a log: its count, hash and index, and its newest elements, the tail. Immutable: an append,
    or sealing the tail, returns a new one.

    The range of a read is the elements with a ts above `since`, and of these the `newest` n or else the
    `oldest` n. Without any of them it is all elements.
    """

    def __new__(cls, id: str, previous: str | None = None) -> LogHead:
        """Create an empty log. `id` (hex) is part of the keys of its objects and must be unique; `previous`
        is that of an expired log at the same key, whose objects are still to be deleted."""
    @staticmethod
    def read(stored: bytes, field: str) -> LogHead:
        """Return the log with this head, or a log that Starfish wrote as one document with its elements in
        `data.<field>`; that one has no id. Raises DocumentCorrupt."""
    @property
    def is_chunked(self) -> bool:
        """True if Starfish stored the elements in chunks. This head then has none, and `gather` returns the
        log."""
    def gather(self, chunks: list[bytes], *, whole: bool = False) -> LogHead:
        """Return the log with the elements of these chunks, in order. The newest chunk must be included;
        `whole` says that all are. Raises DocumentCorrupt, also if `whole` chunks have fewer elements than the
        head counts."""
    def verify(self) -> bool:
        """Return True if the hash is that of the count and the newest element. The checksum, which `read`
        compares, only shows that nothing has changed since the head was stored."""
    def adopted(self, id: str) -> LogHead:
        """Return the log with an id, as pysync writes it."""
    def without_previous(self) -> LogHead:
        """Return the log without `previous`, once the objects of that log are deleted."""
    @property
    def id(self) -> str:
        """Id of the log; empty for one that Starfish wrote."""
    @property
    def previous(self) -> str | None:
        """Id of an expired log at the same key, whose objects are still to be deleted; None without one."""
    @property
    def count(self) -> int:
        """Number of elements that were appended, with those that are no longer retained."""
    @property
    def start(self) -> int:
        """Position of the first retained element."""
    @property
    def dropped_ms(self) -> int:
        """Time of the newest element before `start`; 0 if all elements are retained."""
    @property
    def ts_ms(self) -> int | None:
        """Time of the newest element, None for an empty log."""
    @property
    def written_ms(self) -> int:
        """Time of the write of the head, 0 for an empty log; `ttlMs` counts from here."""
    @property
    def hash(self) -> str:
        """SHA-256 of `{"last":<the last element's data>,"n":<count>}`; `""` for an empty log."""
    @property
    def beside(self) -> str:
        """The other members of `data`, as a JSON object; `""` without any."""
    @property
    def size(self) -> int:
        """Approximate size of `stored` in bytes, rather too large than too small."""
    @property
    def tail_count(self) -> int:
        """Number of elements in the tail."""
    def append(
        self, elements: list[tuple[Append, str]], now_ms: int, max_count: int | None
    ) -> tuple[LogHead, list[tuple[str, int] | str]]:
        """Return the log with the elements that it accepts, in order, and the result of each: the hash of the
        log after it and its time, or an error code: `ts_too_far_ahead`, `append_limit_exceeded` or
        `non_monotonic_timestamp`. Each element comes with its mark (hex), by which `written` finds it; `""`
        for none. The log must have an id."""
    def seal(self, max_bytes: int) -> tuple[LogHead, list[tuple[str, bytes]]]:
        """Return the log with an empty tail, and the objects, by name, to store before its next head:
        segments of at most `max_bytes`, or of one element, and blocks of the index. A name is never reused
        for other bytes."""
    def drop_before(self, start: int, dropped_ms: int) -> LogHead:
        """Return the log without the elements before `start`: the position of a segment or of the tail, or
        `count`, which drops the tail as well. `dropped_ms` is the time of the newest of them."""
    def last_ts_ms(self, node: LogNode, segment: bytes) -> int:
        """Return the time of the last element of a segment. Raises DocumentCorrupt."""
    def stored(self) -> bytes:
        """Return the head object."""
    def nodes(
        self, since: int | None = None, newest: int | None = None, oldest: int | None = None
    ) -> list[LogNode]:
        """Return the nodes to read, in addition to the tail, for the elements in this range, in order."""
    def expand(
        self,
        block: bytes,
        node: LogNode,
        since: int | None = None,
        newest: int | None = None,
        oldest: int | None = None,
    ) -> list[LogNode]:
        """Return the nodes to read below a node above level 0, whose object is `block`. Raises
        DocumentCorrupt."""
    def slice(
        self,
        segments: list[tuple[LogNode, bytes]],
        with_tail: bool,
        since: int | None = None,
        newest: int | None = None,
        oldest: int | None = None,
    ) -> bytes:
        """Return the text of the elements in this range, separated by commas, from consecutive segments and,
        if `with_tail`, from the tail. Raises DocumentCorrupt."""
    def written(self, mark: str, segments: list[tuple[LogNode, bytes]]) -> tuple[str, int] | None:
        """Return the result of the earlier append with this mark, if its element is in the tail or one of the
        segments. Raises DocumentCorrupt."""

@final
class PublicKey:
    """An Ed25519 public key, prepared for verification."""

    def __new__(cls, key: str) -> PublicKey:
        """Parse 64 lower-case hex digits. Raises ValueError for other text, for points that are not on the
        curve or not canonically encoded, and for keys of small order."""
    @property
    def hex(self) -> str:
        """The key as 64 lower-case hex digits."""
    @property
    def user_id(self) -> str:
        """The first 32 hex digits of SHA-256 over the key's 32 bytes."""
    def verify(self, message: bytes, signature: str) -> bool:
        """Return True if `signature` (strict padded base64 of 64 bytes) is a signature of `message` by this
        key."""

@final
class RevocationList:
    """A revocation list of one issuer. `is_signed` checks its signature, `revoked` its entries; parsing
    checks neither."""

    @staticmethod
    def parse(text: bytes) -> RevocationList | None:
        """Parse the JSON text of a list; None if issuer, generation or the list itself are missing or
        malformed."""
    @property
    def iss(self) -> str:
        """`iss`: the public key of the issuer."""
    @property
    def iss_user_id(self) -> str:
        """User id of the issuer."""
    @property
    def generation(self) -> int:
        """`generation` of the list."""
    @property
    def text(self) -> bytes:
        """Its canonical JSON."""
    def is_signed(self) -> bool:
        """Verify the signature of the issuer. Costs one Ed25519 verification."""
    def revoked(self) -> Revoked | None:
        """Return the entries of the list; None if one is malformed."""

@final
class Revoked:
    """The entries of a revocation list, as digests of about 20 bytes each. Its length is their number."""

    @property
    def last_expiry_s(self) -> int:
        """Expiry time of the last entry, in seconds since the epoch; -2**63 without entries."""
    def contains(self, subject: str, nonce: str) -> bool:
        """Return True if the list revokes the certificate of `subject` (`""`: of an audience) with this
        nonce, or every certificate of `subject`."""
    def __len__(self) -> int: ...

def open_certificate(text: bytes) -> tuple[str, int, int] | None:
    """Return the subject (`""` for an audience certificate), `nbf` and `exp` of a certificate (JSON) that is
    signed by its issuer; None if the signature is missing or wrong. Costs one Ed25519 verification. The form
    of the certificate is not checked beyond these members."""

def signed_time(timestamp: str, nonce: str) -> int | None:
    """Return the milliseconds of a timestamp header: up to 16 digits, perhaps after a minus sign. None if it
    has another form, or the nonce header is not 16 bytes in padded standard base64."""

def request_message(method: str, target: str, body: bytes, host: str, ts_ms: int, nonce: str) -> bytes:
    """Return the message that a request signature signs (docs/reference/protocol.md#request-signature)."""

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
    """Return True if `signature` is a signature by `key` of the request, with any of `targets` as its path,
    tried in order. False for texts that contain surrogates, as header values that are not UTF-8 do."""

def verify_requests(
    requests: list[tuple[PublicKey, str, str, list[str], bytes, str, int, str]],
    proofs: list[tuple[str, str, bytes, PublicKey, str]] = ...,
) -> bool:
    """Return True if `verify_request` returns True for the arguments of each request, with the first of its
    targets, and `verify_author` for those of each of `proofs`, whose keys are parsed. Takes about half as
    long as that."""

def verify_author(
    tag: str, document_key: str, data: bytes, author_pubkey: str, author_signature: str
) -> bool:
    """Verify an author proof. `tag` is `starfish-doc-author-v1` or `starfish-append-author-v1`, and `data` is
    canonical text. False for a malformed key or signature.

    See docs/reference/protocol.md#author-proofs.
    """

@final
class Scope:
    """The path entries of a certificate, compiled (docs/reference/protocol.md#path-scopes)."""

    def __new__(cls, paths: list[str], identity: str) -> Scope:
        """Compile the entries. `{identity}` is replaced by `identity`; a leading `!` makes an entry a deny
        entry."""
    def allows(self, document_key: str) -> bool:
        """Return True if an allow entry matches and no deny entry does. Deny entries cover descendants and
        match like regular expressions. Without entries, everything is allowed. The key must be decoded; empty
        and `.` segments are ignored."""
    @property
    def has_denies(self) -> bool:
        """True if there is a deny entry."""
    def undenied(self, prefix: str, names: list[str]) -> list[str]:
        """Return the names whose keys (`prefix` and the name) no deny entry covers."""

@final
class BatchPlanner:
    """The collections of one namespace, prepared for planning batch pulls.

    See docs/reference/protocol.md#batch-pull.
    """

    def __new__(
        cls,
        rows: list[tuple[str, str, bool, bool, int | None, list[str], int | None]],
        max_reads: int,
        max_append_elements: int,
        deny_suffixes: list[str],
    ) -> BatchPlanner:
        """Prepare the collections. Each row is one: its name; its storagePath; True if batches serve it; True
        if the caller's scope applies; its `ttlMs`; the parameters whose values, beside `{identity}`,
        determine who may read; and None for a collection without logs, else the maximum number of elements
        that a read returns (0: no limit).

        `max_reads` limits the names in a batch as well as its reads. A batch must not request a name that
        ends in one of `deny_suffixes`, nor a key whose last segment is one.
        """
    def plan(self, query: bytes, identity: str, scope: Scope | None = None) -> BatchPlan:
        """Return the plan of a batch pull with this query, as received. `identity` replaces an `{identity}`
        that is not given (`""`: none), and keys outside `scope` are `Forbidden`.

        Raises:
            MissingCollections, InvalidParams, InvalidAppendParams, InvalidKnown: parameters that are missing
                or have another shape.
            BatchKeyDenied: a name that ends in a denied suffix, or a key whose last segment is one.
            TooManyCollections, BatchAppendBudgetExceeded
        """

@final
class BatchPlan:
    """A parsed batch pull: entries in the order of the request. Each is an error already, a document or a
    log."""

    @property
    def collections(self) -> list[int]:
        """The requested rows, each once."""
    @property
    def groups(self) -> list[tuple[int, str | None, list[str]]]:
        """Groups that share one authorisation decision: a row, the `{identity}` of the path, and the values
        of the row's deciding parameters in the order of its storagePath."""
    @property
    def reads(self) -> list[tuple[str, int]]:
        """Keys of documents to read, each with its group; no pair occurs twice with the same `known` version.
        A key is in two groups only if two collections contain it."""
    @property
    def known(self) -> dict[int, tuple[str, int | None]]:
        """The versions that the client has, by the index of a read: the first 16 hex digits of the hash, and
        the `ttlMs` of the collection."""
    @property
    def tails(self) -> list[tuple[str, int, int | None, int | None, int | None]]:
        """Logs to read, none twice: key, group, `since`, `newest` and `oldest`. The range is the elements
        with a time above `since`, and of these the `newest` or else the `oldest`; all three are None if the
        request names no range. The counts do not exceed the limit of a read."""
    @property
    def times(self) -> tuple[list[int], list[int]]:
        """How often the response contains each of `reads`, and each of `tails`."""
    def answer(
        self,
        stored: Sequence[bytes | tuple[bytes, object, object, object] | str | None],
        now_ms: int,
        variant: bytes | None = None,
        tails: list[tuple[str, bytes, bool] | str] | None = None,
        unchanged: dict[int, str] | None = None,
    ) -> BatchAnswer:
        """Return the response. `stored` has the result of each of `reads`: bytes, or a tuple that begins with
        them; None for no object; or the text of an error. Bytes that are not a document give
        `document_corrupt`, and a document that has outlived its `ttlMs` is missing.
        `variant` distinguishes responses to callers who see different parts. `tails` has the result of each
        of `self.tails`: the hash of the log, the text of `data` and True if elements were omitted, or the
        text of an error. Omit it if there are none. `unchanged` has the hashes, by the index of a read, of
        documents that the client has, whatever `stored` has of them.

        Raises ValueError if the length of `stored` differs from that of `reads`, or that of `tails` from that
        of `self.tails`, or if `unchanged` names no read.
        """

@final
class BatchAnswer:
    """The response to a batch pull."""

    @property
    def etag(self) -> str:
        """16 hex digits of XXH3 over the names, keys, ranges, hashes and errors of the entries, and the
        variant."""
    @property
    def failed(self) -> bool:
        """True if any entry is an error."""
    @property
    def corrupt(self) -> list[str]:
        """Keys of `reads` whose bytes are not a document."""
    def body(self) -> bytes:
        """Return `{"collections":{name:[entry..]}}`; an entry is a pull response, `{"error":text}` or
        `{"unchanged":true,"hash":..,"timestamp":..}`."""

@final
class ReplayWindow:
    """A set of (key, nonce) pairs, of 19 to 39 bytes each (36 at a million). It has no expiry: its owner
    drops it as a whole. Digests must have 16 bytes, else ValueError is raised."""

    def __new__(cls) -> ReplayWindow: ...
    @staticmethod
    def digest(presenter: str, nonce: str) -> bytes:
        """Return the digest of a pair, 16 bytes."""
    def add(self, digest: bytes) -> bool:
        """Add one digest (16 bytes); return False if it was present."""
    def extend(self, digests: bytes) -> None:
        """Add many digests, concatenated; a rest shorter than 16 bytes is ignored."""
    def __contains__(self, digest: bytes, /) -> bool: ...
    def __len__(self) -> int: ...

def encode_events(data: bytes, received_at: str) -> bytes:
    """Return a Parquet file with a row for each event in the array `events` of `data`, a text as in
    `PushBody.data`; other members are ignored.

    All columns are text: event_type, event, distinct_id, anonymous_id, ts, message_id, properties, context,
    dt, `received_at` as given, and `extra`, the other members of each event as one object, empty without any.
    Strings become their characters, null or an absent member an empty text, and any other value its JSON
    text. An event's own `received_at` is dropped.

    Raises:
        InvalidEvents: `events` is missing or empty, an event is not an object, or they exceed 2 GiB.

    See docs/reference/protocol.md#events.
    """
