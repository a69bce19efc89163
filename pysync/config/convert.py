"""Convert plain values, as JSON has them, to the tree. Problems are collected with their paths; nothing is
raised."""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from pysync.config.collection import AppendOnly, Collection, ParquetPreset, RateLimit, wire_name
from pysync.config.problem import Problem
from pysync.config.schema import Config, Namespace, ProjectionConfig
from pysync.config.webhooks import WebhookConfig

MAX_DEPTH = 64

INVALID: Final = object()
"""The result for an invalid value, after its problem was recorded."""

ENV_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_INTEGER = re.compile(r"-?[0-9]{1,16}")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class EnvString(str):
    """A string from the environment or the command line, which may spell a number or a boolean. `origin`
    names its source."""

    __slots__ = ("origin",)
    origin: str

    def __new__(cls, text: str, origin: str) -> "EnvString":
        """Return `text` with its `origin`."""
        made = super().__new__(cls, text)
        made.origin = origin
        return made


class Converter:
    """The conversion of one configuration. `problems` collects everything that was found, `collection_names`
    the names of collections by their paths, `substituted` the variables that the file names.

    A member with an invalid value takes its default. An object that lacks a required member is left out, so
    that the rules can still check all others. A relative path in the file is relative to `folder`.
    """

    def __init__(self, environ: Mapping[str, str], folder: str) -> None:
        self.problems: list[Problem] = []
        self.collection_names: dict[str, str] = {}
        self.substituted: set[str] = set()
        self._folder = folder
        self._environ = environ
        self._paths: dict[int, str] = {}

    def path_of(self, built: object) -> str:
        """Return the path at which an object of the tree was written; `""` if it was not converted here."""
        return self._paths.get(id(built), "")

    def object(self, value: object, kind: type, path: str) -> Any:
        """Return `value` as a `kind` (a dataclass of the tree); INVALID if a problem leaves nothing to
        build."""
        if not isinstance(value, Mapping):
            return self._expected("an object", value, path)
        name = value.get("name")
        if kind is Collection and isinstance(name, str) and name.isprintable():
            self.collection_names[path] = name
        is_preset = kind is Collection and value.get("preset") is not None
        built = self._preset(value, path) if is_preset else self._object(value, kind, path)
        if built is not INVALID:
            self._paths[id(built)] = path
        return built

    def _preset(self, value: Mapping[Any, Any], path: str) -> Any:
        """Return the collection that a preset describes."""
        preset = self._object(value, ParquetPreset, path)
        if preset is INVALID:
            return INVALID
        if preset.is_inaccessible:
            self._add_problem(join(path, "write"), "read and write cannot both be none")
        return preset.collection()

    def _object(self, value: Mapping[Any, Any], kind: type[Any], path: str) -> Any:
        fields = {wire_name(field.name): field for field in dataclasses.fields(kind)}
        given: dict[str, Any] = {}
        for name, item in value.items():
            at = join(path, name)
            if name not in fields:
                if not (kind is Collection and name == "preset"):  # which is null
                    self._add_problem(at, _unknown_member(str(name), kind, fields))
                continue
            field = fields[name]
            item = NORMALIZERS.get((kind, field.name), _as_is)(item)
            if item is not None:  # null is absent
                given[field.name] = self._convert(item, field.type, at, field.metadata)
        required = [name for name, field in fields.items() if _is_required(field)]
        for name in required:
            if fields[name].name not in given:
                self._add_problem(join(path, name), "is required")
        if any(given.get(fields[name].name, INVALID) is INVALID for name in required):
            return INVALID
        return kind(**{attribute: item for attribute, item in given.items() if item is not INVALID})

    def _convert(self, value: Any, hint: Any, path: str, limits: Mapping[str, Any]) -> Any:
        if isinstance(value, str) and not isinstance(value, EnvString):
            value = self._substituted(value, path)
            if value is INVALID:
                return INVALID
            if value and limits["is_path"]:
                value = os.path.join(self._folder, value)
        if hint is Any:
            return self._json(value, path)
        or_list = ""
        if isinstance(hint, UnionType) or get_origin(hint) is Union:
            choices = [choice for choice in get_args(hint) if choice is not NoneType]
            or_list = " or a list" if any(get_origin(choice) is tuple for choice in choices) else ""
            hint = next((choice for choice in choices if _could_be(value, choice)), choices[0])
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.object(value, hint, path)
        origin = get_origin(hint)
        if origin is tuple:
            return self._list(value, get_args(hint)[0], path, limits)
        if origin is Mapping:
            return self._map(value, get_args(hint)[1], path, limits)
        if origin is Literal:
            return self._choice(value, get_args(hint), path, or_list)
        return self._SCALARS[hint](self, value, path, limits)

    def _list(self, value: Any, hint: Any, path: str, limits: Mapping[str, Any]) -> Any:
        if not isinstance(value, list | tuple):
            return self._expected("a list", value, path)
        items = [self._convert(item, hint, f"{path}[{at}]", limits) for at, item in enumerate(value)]
        return tuple(item for item in items if item is not INVALID)

    def _map(self, value: Any, hint: Any, path: str, limits: Mapping[str, Any]) -> Any:
        if not isinstance(value, Mapping):
            return self._expected("an object", value, path)
        items = {name: self._convert(item, hint, join(path, name), limits) for name, item in value.items()}
        for name in items:
            if not isinstance(name, str) or not name:
                self._add_problem(join(path, name), "a name must be a string that is not empty")
        return {name: item for name, item in items.items() if item is not INVALID and isinstance(name, str)}

    def _choice(self, value: Any, choices: Sequence[Any], path: str, or_list: str) -> Any:
        for choice in choices:
            if value == choice and type(value) is type(choice):
                return choice
            if isinstance(value, EnvString) and value == str(choice):
                return choice
        return self._add_problem(
            path, f"must be {' or '.join(map(_spelled, choices))}{or_list}" + _from(value)
        )

    def _string(self, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
        if not isinstance(value, str):
            return self._expected("a string", value, path)
        if not value and not limits["may_be_empty"]:
            return self._add_problem(path, "must not be empty" + _from(value))
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            return self._add_problem(path, "must be Unicode text, without lone surrogates")
        return str(value)

    def _integer(self, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
        is_number = type(value) is int or (type(value) is float and value.is_integer())  # 1e6
        if not is_number and not (isinstance(value, EnvString) and _INTEGER.fullmatch(value)):
            return self._expected("an integer", value, path)
        number = int(value)
        if number < limits["at_least"]:
            return self._add_problem(path, f"must be at least {limits['at_least']}" + _from(value))
        if number > limits["at_most"]:
            return self._add_problem(path, f"must be at most {limits['at_most']}" + _from(value))
        return number

    def _boolean(self, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
        if isinstance(value, EnvString) and value.lower() in _BOOLEANS:
            return _BOOLEANS[value.lower()]
        if isinstance(value, bool):
            return value
        return self._expected("true or false", value, path)

    _SCALARS: Mapping[type, Callable[..., Any]] = MappingProxyType(
        {str: _string, int: _integer, bool: _boolean}
    )

    def _json(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return `value` as plain JSON values, with the environment substituted in its strings."""
        if depth > MAX_DEPTH:
            return self._add_problem(path[:80] + "…", "nested too deeply")
        if isinstance(value, str):
            text = value if isinstance(value, EnvString) else self._substituted(value, path)
            return text if text is INVALID else str(text)
        if isinstance(value, Mapping):
            if not all(isinstance(name, str) for name in value):
                return self._add_problem(path, "every name must be a string")
            members = {name: self._json(item, join(path, name), depth + 1) for name, item in value.items()}
            return INVALID if INVALID in members.values() else members
        if isinstance(value, list | tuple):
            items = [self._json(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
            return INVALID if INVALID in items else items
        if isinstance(value, NoneType | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return self._expected("a JSON value", value, path)

    def _substituted(self, text: str, path: str) -> Any:
        """Return `text` with each `${NAME}` replaced by the environment's value."""
        names = ENV_REFERENCE.findall(text)
        if not names:
            return text
        self.substituted.update(names)
        missing = [name for name in names if name not in self._environ]
        for name in missing:
            self._add_problem(path, f"environment variable {name} is not set")
        if missing:
            return INVALID
        replaced = ENV_REFERENCE.sub(lambda match: self._environ[match[1]], text)
        return EnvString(replaced, f"environment variable {names[0]}")

    def _expected(self, what: str, value: Any, path: str) -> Any:
        return self._add_problem(path, f"must be {what}, not {_kind(value)}" + _from(value))

    def _add_problem(self, path: str, message: str) -> Any:
        """Record a problem. Messages never quote a value, because it may be a secret from the environment."""
        self.problems.append(Problem(path, message))
        return INVALID


def join(path: str, name: object) -> str:
    """Return the path of a member: `server.port`, `namespaces["a b"]`."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_$-]+", name):
        return f"{path}.{name}" if path else name
    return f"{path}[{ascii(name)[:60]}]"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?`, or an empty text if no known name is similar."""
    import difflib

    found = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def _unknown_member(name: str, kind: type, fields: Iterable[str]) -> str:
    """Return the message about a member that the object does not have."""
    others = {wire_name(field.name) for field in dataclasses.fields(Collection)}
    is_decided = kind is ParquetPreset and name in others
    known = (*fields, "preset") if kind is Collection else fields
    return ("cannot be used with preset" if is_decided else "unknown member") + suggest(name, known)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _could_be(value: Any, hint: Any) -> bool:
    """Return True if the type of this value fits `hint`, which is one of several allowed types."""
    if get_origin(hint) is Literal:
        return any(
            value is choice or (isinstance(value, str) and isinstance(choice, str))
            for choice in get_args(hint)
        )
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple)
    if dataclasses.is_dataclass(hint) or get_origin(hint) is Mapping:
        return isinstance(value, Mapping)
    return isinstance(hint, type) and isinstance(value, hint)


def _kind(value: Any) -> str:
    kinds = (
        (NoneType, "null"),
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a fraction"),
        (str, "a string"),
        (Mapping, "an object"),
        (list | tuple, "a list"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), type(value).__name__)


def _spelled(choice: object) -> str:
    return f'"{choice}"' if isinstance(choice, str) else str(choice).lower()


def _from(value: Any) -> str:
    return f" ({value.origin})" if isinstance(value, EnvString) else ""


def _as_is(value: Any) -> Any:
    return value


def _append_only(value: Any) -> Any:
    if value is True:
        return {}
    return None if value is False else value


def _rate_limit(value: Any) -> Any:
    """Convert the short forms: `true` takes every number from the server's limit; `none` is `false`."""
    if value is True:
        return {}
    return False if value == "none" else value


def _default_rate_limit(value: Any) -> Any:
    return None if isinstance(value, bool) or value == "none" else value


def _zero_is_absent(value: Any) -> Any:
    return None if value == 0 and not isinstance(value, bool) else value


def _without_parameters(value: Any) -> Any:
    """Return media types in the form in which they are compared: `application/json` for `application/json;
    charset=utf-8`."""
    if not isinstance(value, list | tuple):
        return value
    return [item.partition(";")[0].strip() if isinstance(item, str) else item for item in value]


def _one_or_many(kind: type) -> Callable[[Any], Any]:
    return lambda value: [value] if isinstance(value, kind) else value


NORMALIZERS: Mapping[tuple[type, str], Callable[[Any], Any]] = {
    (Config, "store"): lambda value: {"url": value} if isinstance(value, str) else value,
    (Config, "rate_limit"): _default_rate_limit,
    (Config, "scrub"): lambda value: None if value is True else value,
    (Config, "restrictions"): _one_or_many(Mapping),
    (Namespace, "restrictions"): _one_or_many(Mapping),
    (Collection, "restrictions"): _one_or_many(Mapping),
    (Collection, "append_only"): _append_only,
    (Collection, "rate_limit"): _rate_limit,
    (Collection, "ttl_ms"): _zero_is_absent,
    (Collection, "allowed_mime_types"): _without_parameters,
    (ParquetPreset, "rate_limit"): _rate_limit,
    (AppendOnly, "max_items"): _zero_is_absent,
    (RateLimit, "push"): _rate_limit,
    (RateLimit, "pull"): _rate_limit,
    (RateLimit, "list"): _rate_limit,
    (ProjectionConfig, "source"): _one_or_many(str),
    (WebhookConfig, "secret"): _one_or_many(str),
}
"""Functions that convert the other spellings of a member to that of the tree; None means absent."""
