"""Load a file, the environment and flags into one Config, or report every problem at once.

See docs/reference/configuration.md.
"""

import os
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pysync.config import validation
from pysync.config.convert import ENV_REFERENCE, Converter, EnvString, suggest
from pysync.config.problem import ConfigError, Problem
from pysync.config.schema import Config

MAX_BYTES = 4 * 1024 * 1024
_COLLECTION = re.compile(r"(namespaces.+?\.)?collections\[[0-9]+\]")
EMPTY: Mapping[str, Any] = MappingProxyType({})

ENVIRONMENT: Final = {
    "PYSYNC_SERVER_HOST": "server.host",
    "PYSYNC_SERVER_PORT": "server.port",
    "PYSYNC_SERVER_ADMIN_HOST": "server.admin.host",
    "PYSYNC_SERVER_ADMIN_PORT": "server.admin.port",
    "PYSYNC_SERVER_WORKERS": "server.workers",
    "PYSYNC_SERVER_TRUSTED_PROXY_HOPS": "server.trustedProxyHops",
    "PYSYNC_SERVER_LOG_LEVEL": "server.logLevel",
    "PYSYNC_SERVER_LOG_REFUSALS": "server.logRefusals",
    "PYSYNC_STORE": "store.url",
    "PYSYNC_COORDINATOR": "coordinator",
    "PYSYNC_ADMIN_TOKEN": "auth.adminToken",
}
"""The environment variables that override members of the file, and these members."""

_PREFIX: Final = "PYSYNC_"
_OF_COMMANDS: Final = ("PYSYNC_CONFIG", "PYSYNC_KEY", "PYSYNC_URL")
"""Those that the command line reads."""

_REMOVED: Final = {
    "PYSYNC_MAX_COLLECTIONS_PER_BATCH": "maxCollectionsPerBatch",
    "PYSYNC_MAX_BATCH_APPEND_ELEMENTS": "maxBatchAppendElements",
    "PYSYNC_SERVER_MOUNT_PATH": "server.mountPath",
    "PYSYNC_SERVER_EXAMPLES": "server.examples",
    "PYSYNC_SERVER_DRAIN_TIMEOUT_MS": "server.drainTimeoutMs",
    "PYSYNC_STORE_ENDPOINT": "store.endpoint",
    "PYSYNC_STORE_REGION": "store.region",
    "PYSYNC_STORE_FORCE_PATH_STYLE": "store.forcePathStyle",
    "PYSYNC_STORE_ACCESS_KEY_ID": "store.accessKeyId",
    "PYSYNC_STORE_SECRET_ACCESS_KEY": "store.secretAccessKey",
    "PYSYNC_STORE_MAX_CONNECTIONS": "store.maxConnections",
    "PYSYNC_STORE_TIMEOUT_MS": "store.timeoutMs",
}
"""Those of 0.1.0 that are errors, because a server without them would run with another configuration."""


def load(
    path: str | os.PathLike[str],
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] = EMPTY,
) -> Config:
    """Return the configuration in the file (`.json`, `.yaml`, `.yml` or `.toml`; at most 4 MiB).

    The variables of ENVIRONMENT in `environ` override it, `overrides` override both. Raises ConfigError with
    every problem found, also for a file that cannot be read.
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

    `overrides` are flags: they map the path of a member that a variable can set too (`server.port`, `store`)
    to its value. A string may spell the value; None means that the flag is absent. Raises ConfigError, and
    KeyError for another path.
    """
    if not isinstance(value, Mapping):
        raise ConfigError([Problem("", "the configuration must be an object")])
    value = {name: item for name, item in value.items() if name != "$schema"}  # for editors
    converter = Converter(environ, folder)
    config: Config = converter.object(_apply_overrides(value, environ, overrides), Config, "")
    found = [
        *converter.problems,
        *_removed(environ, converter.substituted),
        *validation.validate(config, converter.path_of),
    ]
    problems = list(dict.fromkeys(found))
    if problems:
        raise ConfigError([*with_collections(problems, converter.collection_names)])
    return config


def with_collections(problems: Iterable[Problem], names: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems, those inside a collection with its name. `names` are the names of collections by
    their paths."""
    for problem in problems:
        found = _COLLECTION.match(problem.path)
        yield replace(problem, collection=names.get(found[0], "")) if found else problem


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
            if not isinstance(inner, Mapping | None):
                break  # the conversion reports the wrong type
            target[section] = dict(inner or {})
            target = target[section]
        else:
            target[name] = item
    return changed


def _settings(environ: Mapping[str, str], flags: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield paths and values; later ones override earlier ones. An empty variable counts as unset."""
    for variable, path in ENVIRONMENT.items():
        if environ.get(variable):
            yield path, EnvString(environ[variable], f"environment variable {variable}")
    known = {path: path for path in ENVIRONMENT.values()} | {"store": "store.url"}
    for path, value in flags.items():
        if value is not None:
            yield known[path], EnvString(value, "command line") if isinstance(value, str) else value


def _removed(environ: Mapping[str, str], substituted: Container[str]) -> Iterator[Problem]:
    """Yield a problem for each removed variable that is set, unless the file names it."""
    for variable, path in _REMOVED.items():
        if environ.get(variable) and variable not in substituted:
            message = f"{variable} no longer sets this member: write it in the file, as ${{{variable}}} if"
            yield Problem(path, f"{message} its value should come from the environment")


def unread_variables(environ: Mapping[str, str], value: object) -> Iterator[Problem]:
    """Yield a warning for each variable that begins with `PYSYNC_`, and that neither pysync nor a file with
    the content `value` reads."""
    known = {*ENVIRONMENT, *_OF_COMMANDS, *_REMOVED, *ENV_REFERENCE.findall(repr(value))}
    suffixes = [variable.removeprefix(_PREFIX) for variable in (*ENVIRONMENT, *_OF_COMMANDS)]
    for name in environ:
        if name.startswith(_PREFIX) and name not in known:
            suggested = suggest(name.removeprefix(_PREFIX), suffixes).replace(" mean ", f" mean {_PREFIX}")
            yield Problem("environment", f"nothing reads {name}{suggested}")


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
