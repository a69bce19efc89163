"""Plain Python twins of the core: the oracle of its tests, and what `benches/core.py` measures it against.

Written for being obviously right, from the protocol's text and not from the core.
"""

import base64
import binascii
import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pysync.errors import (
    AuthorProofMissing,
    BatchAppendBudgetExceeded,
    BatchKeyDenied,
    BodyNotObject,
    BodyTooDeep,
    InvalidAppendParams,
    InvalidBaseHash,
    InvalidData,
    InvalidEvents,
    InvalidJson,
    InvalidKnown,
    InvalidParams,
    MissingCollections,
    TooManyCollections,
)

MAX_DEPTH = 64
UNSAFE_KEYS = frozenset({"__proto__", "constructor", "prototype", "__class__", "__dict__"})
SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def number_text(number: float) -> str:
    """ECMAScript's text of a double: the shortest digits that read back as it, laid out by its magnitude."""
    if number == 0:
        return "0"
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits))
    point = len(text) + exponent  # digits before the decimal point
    if 0 < point <= 21:
        plain = text.ljust(point, "0")
        body = plain if len(text) <= point else f"{text[:point]}.{text[point:]}"
    elif -6 < point <= 0:
        body = f"0.{'0' * -point}{text}"
    else:
        fraction = f".{text[1:]}" if len(text) > 1 else ""
        body = f"{text[0]}{fraction}e{point - 1:+d}"
    return "-" * sign + body


def string_text(text: str) -> str:
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in SHORT_ESCAPES:
        return SHORT_ESCAPES[character]
    return f"\\u{ord(character):04x}" if character < " " else character


def canonical(value: Any) -> str:
    """The canonical text of a parsed value."""
    return _text(value, integer_text=lambda integer: number_text(float(integer)))


def exact(value: Any) -> str:
    """The canonical text, but for integers, which keep their digits."""
    return _text(value, integer_text=str)


def _text(value: Any, integer_text: Callable[[int], str]) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return integer_text(value)
        case float():
            return number_text(value)
        case str():
            return string_text(value)
        case list():
            return "[" + ",".join(_text(item, integer_text) for item in value) + "]"
        case dict():
            members = (f"{string_text(key)}:{_text(value[key], integer_text)}" for key in sorted(value))
            return "{" + ",".join(members) + "}"
    raise TypeError(type(value))


def parse(text: bytes) -> Any:
    """The value of a JSON text, integers beyond 64 bits as doubles. Raises InvalidJson and BodyTooDeep as the
    core does."""

    def reject(token: str) -> NoReturn:
        raise ValueError(token)

    def double(token: str) -> float:
        number = float(token)
        if number in (float("inf"), float("-inf")):
            reject(token)
        return number

    def integer(token: str) -> int | float:
        number = int(token) if len(token) <= 20 else 2**64
        return number if -(2**63) <= number < 2**64 else double(token)

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):  # what a later member of the name replaces must be text too
            check_text(pairs)
        return found

    def check_text(value: Any) -> None:
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates

    try:
        value = json.loads(
            text.decode(),
            parse_constant=reject,
            parse_float=double,
            parse_int=integer,
            object_pairs_hook=members,
        )
        check_text(value)
    except ValueError as error:
        raise InvalidJson from error
    if depth(value) > MAX_DEPTH:
        raise BodyTooDeep
    return value


def depth(value: Any) -> int:
    """How many objects and arrays lie within each other."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def sanitized(value: Any) -> Any:
    """`value` without the members that are unsafe, arrays as they are."""
    if not isinstance(value, dict):
        return value
    return {key: sanitized(member) for key, member in value.items() if key not in UNSAFE_KEYS}


def canonicalize(text: bytes) -> bytes:
    return canonical(parse(text)).encode()


def content_hash(text: bytes) -> str:
    return hashlib.sha256(canonicalize(text)).hexdigest()


def decode_push(body: bytes) -> tuple[bytes, bytes, str, str | None, str | None, str | None]:
    """`data` exact and canonical, its hash, `baseHash`, and both author members of a push body."""
    members = parse(body)
    if not isinstance(members, dict):
        raise BodyNotObject
    data, base_hash = members.get("data"), members.get("baseHash")
    if not isinstance(data, dict):
        raise InvalidData
    if not isinstance(base_hash, str | None):
        raise InvalidBaseHash
    pubkey, signature = members.get("authorPubkey"), members.get("authorSignature")
    if not (pubkey is signature is None or (isinstance(pubkey, str) and isinstance(signature, str))):
        raise AuthorProofMissing
    data = sanitized(data)
    text = canonical(data).encode()
    return exact(data).encode(), text, hashlib.sha256(text).hexdigest(), base_hash, pubkey, signature


EVENT_COLUMNS = (
    *("event_type", "event", "distinct_id", "anonymous_id", "ts", "message_id"),
    *("properties", "context", "dt"),
)  # fmt: skip


def event_columns(data: bytes) -> list[list[str]]:
    """The texts of each column of a batch of events, `extra` last."""
    events = parse(data).get("events")
    if not isinstance(events, list) or not events or not all(isinstance(event, dict) for event in events):
        raise InvalidEvents
    columns = [[_cell(event.get(name)) for event in events] for name in EVENT_COLUMNS]
    others = [
        {name: value for name, value in event.items() if name not in (*EVENT_COLUMNS, "received_at")}
        for event in events
    ]
    return [*columns, [exact(members) if members else "" for members in others]]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else exact(value)


def stored(data: bytes, data_hash: str, ts_ms: int, pubkey: str | None, signature: str | None) -> bytes:
    """The object to store for `data`."""
    members = [f'"v":1,"ts":{ts_ms},"hash":"{data_hash}"']
    if pubkey is not None and signature is not None:
        members.append(f'"authorPubkey":{string_text(pubkey)},"authorSignature":{string_text(signature)}')
    members.append(f'"data":{data.decode()}')
    return ("{" + ",".join(members) + "}").encode()


def pull_body(document: bytes, timestamp_ms: int) -> bytes:
    """The pull answer for a stored document."""
    value = json.loads(document)
    members = {"data": value["data"], "hash": value["hash"], "timestamp": timestamp_ms}
    members |= {name: value[name] for name in ("authorPubkey", "authorSignature") if name in value}
    return ("{" + ",".join(f"{string_text(k)}:{exact(v)}" for k, v in members.items()) + "}").encode()


def request_message(method: str, target: str, body: bytes, host: str, ts_ms: int, nonce: str) -> bytes:
    body_hash = hashlib.sha256(body).hexdigest()
    request = {"b": body_hash, "h": host, "m": method, "nonce": nonce, "p": target, "ts": ts_ms}
    return f"starfish-req-v1\n{canonical(request)}".encode()


def author_message(tag: str, document_key: str, data: Any) -> bytes:
    return f"{tag}\n{canonical({'k': document_key, 'd': data})}".encode()


def verify(key: str, message: bytes, signature: str) -> bool:
    """Whether a strictly encoded signature holds, by another implementation of Ed25519."""
    try:
        decoded = base64.b64decode(signature, validate=True)
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(decoded, message)
    except (binascii.Error, InvalidSignature):
        return False
    return True


def matches_narrowly(glob: str, text: str) -> bool:
    """The glob as published clients match it: by widening the latest star only, and giving up where that is
    a single one before a `/`."""
    tokens = re.findall(r"\*\*|\*|[^*]", glob, re.DOTALL)
    latest: tuple[int, int] | None = None  # the star's token, and where its run ends
    token = at = 0
    while at < len(text):
        if token < len(tokens) and tokens[token] in ("*", "**"):
            latest = token, at
            token += 1
        elif token < len(tokens) and tokens[token] == text[at]:
            token, at = token + 1, at + 1
        elif latest is None or (tokens[latest[0]] == "*" and text[latest[1]] == "/"):
            return False
        else:
            latest = latest[0], latest[1] + 1
            token, at = latest[0] + 1, latest[1]
    return all(rest in ("*", "**") for rest in tokens[token:])


def matches_widely(glob: str, text: str) -> bool:
    """The glob as a regular expression."""
    runs = {"**": ".*", "*": "[^/]*"}
    tokens = re.findall(r"\*\*|\*|[^*]", glob, re.DOTALL)
    pattern = "".join(runs.get(token) or re.escape(token) for token in tokens)
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def scope_allows(paths: list[str], identity: str, key: str) -> bool:
    if not paths:
        return True
    key = "/".join(segment for segment in key.split("/") if segment not in ("", "."))
    entries = [entry.replace("{identity}", identity) for entry in paths]
    denies = [entry[1:] for entry in entries if entry.startswith("!")]
    return any(matches_narrowly(entry, key) for entry in entries if not entry.startswith("!")) and not any(
        matches_widely(deny, key) or matches_widely(f"{deny}/**", key) for deny in denies
    )


Bounds = tuple[int | None, int | None, int | None]
"""`since`, `newest` and `oldest` of a log's elements."""
BatchRow = tuple[str, str, bool, bool, int | None, list[str], int | None]


def batch_entries(
    rows: list[BatchRow], limits: tuple[int, int, list[str]], query: str, identity: str, paths: list[str]
) -> dict[str, list[tuple[str, str]]]:
    """What a batch pull asks for: by name, in order, `("read", key)`, `("known", "<digits>:<key>")` for a
    document of which the client has a version, `("tail", "<key> <since> <newest> <oldest>")` or `("error",
    text)`."""
    max_reads, max_elements, suffixes = limits
    given: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        given.setdefault(name, value)
    names = list(dict.fromkeys(filter(None, given.get("collections", "").split(","))))
    if not names:
        raise MissingCollections
    if any(name.endswith(tuple(suffixes)) for name in names):
        raise BatchKeyDenied
    params = _listed(given.get("params"), (dict,), InvalidParams)
    append = _listed(given.get("appendParams"), (dict, type(None)), InvalidAppendParams)
    known = _listed(given.get("known"), (str, type(None)), InvalidKnown)
    named = [digits for items in known.values() for digits in items if digits is not None]
    if not all(re.fullmatch("[0-9a-f]{16}", digits) for digits in named):
        raise InvalidKnown
    sets = {name: params.get(name, [{}]) for name in names}
    if len(names) > max_reads or sum(map(len, sets.values())) > max_reads:
        raise TooManyCollections
    maxima = {row[0]: row[6] for row in rows}
    elements = 0
    bounds: dict[str, list[Bounds | None]] = {}
    for name in names:
        if name in known and len(known[name]) != len(sets[name]):
            raise InvalidKnown
        if name not in append:
            continue
        if len(append[name]) != len(sets[name]):
            raise InvalidAppendParams
        bounds[name] = [
            None if named is None else _bounds(named, maxima.get(name) or None) for named in append[name]
        ]
        elements += sum(newest or oldest or 0 for _, newest, oldest in filter(None, bounds[name]))
    if elements > max_elements:
        raise BatchAppendBudgetExceeded
    by_name = {row[0]: row for row in rows if row[2]}
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        found[name] = []
        for at, params_of_one in enumerate(sets[name]):
            entry = ("error", "Collection not found")
            if name in by_name:
                _, template, _, scoped, _, _, most = by_name[name]
                entry = _batch_entry(template, params_of_one, identity, suffixes)
                requested = bounds[name][at] if name in bounds else None
                if entry[0] == "read" and most is None and requested is not None:
                    entry = ("error", "append_params_not_supported")
                elif entry[0] == "read" and scoped and not scope_allows(paths, identity, entry[1]):
                    entry = ("error", "Forbidden")
                elif entry[0] == "read" and most is not None:
                    since, newest, oldest = requested or (None, None, None)
                    entry = ("tail", f"{entry[1]} {since} {newest} {oldest}")
                elif entry[0] == "read" and name in known and known[name][at] is not None:
                    entry = ("known", f"{known[name][at]}:{entry[1]}")
            found[name].append(entry)
    return found


def _listed(text: str | None, kinds: tuple[type, ...], error_type: type[Exception]) -> dict[str, list[Any]]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        raise error_type from None
    well_formed = isinstance(value, dict) and all(
        isinstance(items, list) and all(isinstance(item, kinds) for item in items) for items in value.values()
    )
    if not well_formed:
        raise error_type
    checked: dict[str, list[Any]] = value
    return checked


def _bounds(named: dict[str, Any], most: int | None) -> Bounds:
    counts = [named[name] for name in ("since", "last", "limit") if name in named]
    if "full" in named or any(type(count) is not int or not 0 <= count < 2**64 for count in counts):
        raise InvalidAppendParams
    since, newest = named.get("since"), named.get("limit", named.get("last"))
    if since is not None:
        since = min(since, 2**63 - 1)
    if newest is None:
        return since, None, None if since is None else most or 1000
    return since, newest if most is None else min(newest, most), None


def _batch_entry(
    template: str, params: dict[str, Any], identity: str, suffixes: list[str]
) -> tuple[str, str]:
    parts = []
    well_formed = True
    for part in template.split("/"):
        if part.startswith("{"):
            name = part[1:-1]
            if name not in params and not (name == "identity" and identity):
                return ("error", "Missing required path parameter")
            value = params.get(name, identity)
            if type(value) not in (str, int, float):
                raise InvalidParams
            if type(value) is int and not -(2**63) <= value < 2**64:
                value = float(value)
            part = number_text(value) if isinstance(value, float) else str(value)
            well_formed &= re.fullmatch(r"(?!\.\Z)(?!.*\.\.)[A-Za-z0-9._:@-]{1,255}", part) is not None
        parts.append(part)
    key = "/".join(parts)
    if not well_formed or len(key) > 1000 or parts[0] == "_pysync":
        return ("error", "Invalid path parameter")
    if f"/{key}".endswith(tuple(f"/{suffix}" for suffix in suffixes)):
        raise BatchKeyDenied
    return ("read", key)


def split_key(key: str) -> tuple[str, str]:
    """The parent and the name of a key."""
    if "\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise ValueError(f"not a key: {key!r}")
    key.encode()
    parent, _, name = key.rpartition("/")
    return parent, name
