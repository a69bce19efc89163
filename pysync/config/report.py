"""The output of `pysync check FILE`: every problem, or the warnings and the route table."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pysync.config.derived import accepts_json, file_types
from pysync.config.lint import lint
from pysync.config.loader import parse, read_file
from pysync.config.problem import ConfigError, Problem
from pysync.config.routes import RouteSpec, routes_of
from pysync.config.schema import Collection, Config

_OF_COLLECTION = ("pull", "push", "append", "list")
_PROBES = ("health", "ready", "metrics", "version")
_SERVICE_ROLES = {
    "batch": "as pulls of what is named",
    "events": "as pulls of what is named",
    "revoke": "public (a signed list)",
    "revocations": "public",
    "openapi": "public",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One route, its collection (`""` if it has none), and the roles that it requires. A bundle's pull has
    those of all its members."""

    method: Literal["GET", "POST"]
    path: str
    collection: str
    roles: tuple[str, ...]


def check(
    path: str,
    environ: Mapping[str, str] = os.environ,
    validate: Callable[[Config], object] = lambda config: None,
    *,
    strict: bool = False,
) -> tuple[bool, str]:
    """Return True if the file is accepted, and a report of its problems or warnings. `validate` may find
    further problems, for which it raises ConfigError. If `strict`, a file with warnings is not accepted."""
    try:
        value = read_file(Path(path))
    except ConfigError as error:
        return False, str(error)  # the message names the file
    try:
        config = parse(value, environ, folder=os.path.dirname(path))
        validate(config)
    except ConfigError as error:
        return False, "\n".join(
            [f"{path}: {pluralize(error.problems, 'problem')}", "", *_problem_lines(error.problems)]
        )
    warnings = lint(config, environ, value)
    accepted = not (strict and warnings)
    verdict = "accepted" if accepted else "rejected, because warnings count as problems (--strict)"
    return accepted, f"{path}: {verdict}\n\n{report(config, warnings)}"


def report(config: Config, warnings: Sequence[Problem] | None = None) -> str:
    """Return the warnings and the route table of an accepted configuration, as text without a final line
    break."""
    warnings = lint(config) if warnings is None else warnings
    lines = [*format_problems(warnings, "warning"), ""] if warnings else []
    routes = [
        (route.method, route.path, route.collection, _roles_text(route)) for route in routes_table(config)
    ]
    return "\n".join(lines + align_columns([("METHOD", "PATH", "COLLECTION", "ROLES"), *routes]))


def format_problems(problems: Sequence[Problem], noun: str) -> list[str]:
    """Return the problems as lines, after a line with their number."""
    return [pluralize(problems, noun), "", *_problem_lines(problems)]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns; the last column may have any length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [line.rstrip() for line in lines]


def routes_table(config: Config) -> list[Row]:
    """Return the routes that are served, in the order of the file, under the mount path and their namespace;
    last those of the whole service. Probes and metrics are left out."""
    mount, batched = config.server.mount_path, {events.collection for events in config.events}
    hidden = {f"{mount}/sync/config", "/openapi.json" if mount else ""}
    return [
        Row(spec.method, spec.path, _label(spec, batched), _roles(spec, config))
        for spec in routes_of(config)
        if spec.action not in _PROBES and (spec.namespace or spec.path not in hidden)
    ]


def _label(spec: RouteSpec, batched: set[str]) -> str:
    if spec.action == "bundle":
        return ", ".join(member.name for member in spec.collections)
    if spec.action in _OF_COLLECTION:
        (collection,) = spec.collections
        return collection.name + (" (events)" if collection.name in batched else _kind(collection))
    return ""


def _roles(spec: RouteSpec, config: Config) -> tuple[str, ...]:
    if spec.action == "bundle":
        return tuple(dict.fromkeys(role for member in spec.collections for role in member.read_roles))
    if spec.action in _OF_COLLECTION:
        (collection,) = spec.collections
        pushed = spec.action in ("push", "append")
        return _display_roles(collection, collection.write_roles if pushed else collection.read_roles)
    if spec.action == "config" and config.config_endpoint is not None:
        return ("public" if config.config_endpoint.auth == "public" else "public (filtered by roles)",)
    return (_SERVICE_ROLES[spec.action],)


def _kind(collection: Collection) -> str:
    """Return the kind of its contents, in parentheses; an empty text for documents alone."""
    if collection.append_only is not None:
        return " (log)"
    if not file_types(collection):
        return ""
    return " (documents, files)" if accepts_json(collection) else " (files)"


def _display_roles(collection: Collection, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Return the roles as the table shows them."""
    if collection.require_auth is True:
        roles = tuple("public (signed)" if role == "public" else role for role in roles)
    if collection.root_only:
        roles = tuple(f"{role} + device:root" for role in roles)
    return roles


def _roles_text(route: Row) -> str:
    return ", ".join(route.roles) or "nobody"


def pluralize(items: Sequence[object], noun: str) -> str:
    """Return the number of items with its noun: `1 warning`, `2 warnings`."""
    return f"{len(items)} {noun}" + ("" if len(items) == 1 else "s")


def _problem_lines(problems: Sequence[Problem]) -> list[str]:
    return ["  " + line for line in align_columns([(found.location, found.message) for found in problems])]
