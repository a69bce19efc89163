"""Load a file, the environment and flags into one Config, or report every problem at once.

See docs/reference/configuration.md.

"""

import dataclasses
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pysync.config import validation
from pysync.config.collection import wire_name
from pysync.config.convert import Converter, EnvString, join
from pysync.config.problem import ConfigError, Problem
from pysync.config.schema import Config

MAX_BYTES = 4 * 1024 * 1024
_WORD = re.compile(r"\.|(?=[A-Z])")
"""The place between two words of a path."""
_COLLECTION = re.compile(r"(namespaces.+?\.)?collections\[[0-9]+\]")
_SHORTHAND = ("rateLimit", "push", "pull", "list", "scrub")
"""Objects that can also be written as one word."""
EMPTY: Mapping[str, Any] = MappingProxyType({})


def load(
    path: str | os.PathLike[str],
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] = EMPTY,
) -> Config:
    """Return the configuration in the file (`.json`, `.yaml`, `.yml` or `.toml`; at most 4 MiB).

    `PYSYNC_...` variables of `environ` override it, `overrides` override both. Raises ConfigError with every
    problem found, also for a file that cannot be read.
    """
    try:
        return parse(read_file(Path(path)), environ, overrides, os.path.dirname(path))
    except ConfigError as error:
        raise error.with_file(path) from None


def parse(
    value: object,
    environ: Mapping[str, str] = EMPTY,
    overrides: Mapping[str, object] = EMPTY,
    folder: str = "",
) -> Config:
    """Return the configuration that a file in `folder` with this content would give. `value` consists of
    plain JSON values.

    `overrides` are flags: they map the path of a scalar (`server.port`, `store`) to its value. A string may
    spell the value; None means that the flag is absent. Raises ConfigError, and KeyError for a flag that is
    not the path of a scalar.
    """
    if not isinstance(value, Mapping):
        raise ConfigError([Problem("", "the configuration must be an object")])
    value = {name: item for name, item in value.items() if name != "$schema"}  # for editors
    converter = Converter(environ, folder)
    config: Config = converter.object(_apply_overrides(value, environ, overrides), Config, "")
    problems = list(dict.fromkeys([*converter.problems, *validation.validate(config, converter.path_of)]))
    if problems:
        raise ConfigError([*with_collections(problems, converter.collection_names)])
    return config


def with_collections(problems: Iterable[Problem], names: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems, those inside a collection with its name. `names` are the names of collections by
    their paths."""
    for problem in problems:
        found = _COLLECTION.match(problem.path)
        yield replace(problem, collection=names.get(found[0], "")) if found else problem


@cache
def env_overrides() -> Mapping[str, str]:
    """Return the environment variables that override members, with the members' paths."""
    short = {"PYSYNC_STORE": "store.url", "PYSYNC_ADMIN_TOKEN": "auth.adminToken"}
    paths = (path for path, _ in _members(Config) if path not in short.values())
    return short | {"PYSYNC_" + _WORD.sub("_", path).upper(): path for path in paths}


@cache
def json_valued_paths() -> frozenset[str]:
    """Return the paths of members whose variables contain JSON: lists, objects whose members have free names,
    and objects that may be `false`."""

    def is_json(hint: Any) -> bool:
        return get_origin(hint) in (tuple, Mapping) or dataclasses.is_dataclass(hint)

    members = _members(Config)
    return frozenset(path for path, hint in members if any(map(is_json, (hint, *get_args(hint)))))


def _members(kind: type, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and types of the members of an object, and of the objects inside it. A member that is
    itself such an object is left out, unless it may also be `false`."""
    for field in dataclasses.fields(kind):
        path = join(above, wire_name(field.name))
        is_union = get_origin(field.type) in (UnionType, Union)
        choices = get_args(field.type) if is_union else (field.type,)
        inner = next((one for one in choices if dataclasses.is_dataclass(one)), None)
        if not isinstance(inner, type) or any(get_origin(one) is Literal for one in choices):
            yield path, field.type
        if isinstance(inner, type):
            yield from _members(inner, path)


def _apply_overrides(
    value: Mapping[str, Any], environ: Mapping[str, str], flags: Mapping[str, object]
) -> Mapping[str, Any]:
    changed = dict(value)
    for path, item in _settings(environ, flags):
        *sections, name = path.split(".")
        target = changed
        for section in sections:
            inner = target.get(section)
            if isinstance(inner, str) and section == "store":
                inner = {"url": inner}
            if section in _SHORTHAND and (isinstance(inner, bool) or inner == "none"):
                inner = None
            if not isinstance(inner, Mapping | None):
                break  # the conversion reports the wrong type
            target[section] = dict(inner or {})
            target = target[section]
        else:
            target[name] = item
    return changed


def _settings(environ: Mapping[str, str], flags: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield paths and values; later ones override earlier ones. An empty variable counts as unset."""
    for variable, path in env_overrides().items():
        if environ.get(variable):
            text = EnvString(environ[variable], f"environment variable {variable}")
            yield path, _decode_json(text) if path in json_valued_paths() else text
    known = {path: path for path in env_overrides().values()} | {"store": "store.url"}
    for path, value in flags.items():
        if value is not None:
            yield known[path], EnvString(value, "command line") if isinstance(value, str) else value


def _decode_json(text: EnvString) -> object:
    """Return the value that the text spells in JSON. If it is not JSON, return the text itself, which the
    conversion then reports."""

    def marked(value: Any) -> Any:
        """Return `value` with its strings marked, so that they are not substituted."""
        if isinstance(value, str):
            return EnvString(value, text.origin)
        if isinstance(value, list):
            return [marked(item) for item in value]
        return {name: marked(item) for name, item in value.items()} if isinstance(value, dict) else value

    try:
        return marked(_json(text))
    except (ValueError, RecursionError):
        return text


def read_file(path: Path) -> object:
    """Return the plain values that the file contains. Raises ConfigError if it is unreadable, larger than
    MAX_BYTES, or not of its format."""
    decode = _FORMATS.get(path.suffix.lower())
    if decode is None:
        raise ConfigError([Problem("", f"{path.name}: its name must end in {', '.join(_FORMATS)}")])
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return decode(content.decode("utf-8-sig"))
    except OSError as error:
        reason = error.strerror
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error)
    raise ConfigError([Problem("", f"{path}: {reason}")])


def _json(text: str) -> object:
    # The standard library's parser can report duplicate members; orjson cannot.
    import json

    def reject_constant(token: str) -> object:
        raise ValueError(f"{token} is not JSON")

    return json.loads(text, object_pairs_hook=_unique, parse_constant=reject_constant)


def _unique(members: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, value in members:
        if name in found:
            raise ValueError(f"member {name!r} is written twice in one object")
        found[name] = value
    return found


def _toml(text: str) -> object:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            _unique([(name, None) for name in names])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:  # its text would quote the line, and any secret in it
        at = error.problem_mark
        location = f" (line {at.line + 1}, column {at.column + 1})" if at else ""
        raise ValueError(f"{error.problem}{location}") from None
    except yaml.YAMLError:
        raise ValueError("holds characters that YAML does not allow") from None


_FORMATS: Mapping[str, Callable[[str], object]] = {
    ".json": _json,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": _toml,
}
