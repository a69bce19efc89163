"""What `pysync check FILE` prints: every problem, or the warnings and the route table."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pysync.config.derived import accepts_json, file_types
from pysync.config.lint import lint
from pysync.config.loader import parse, read_file
from pysync.config.problem import ConfigError, Problem
from pysync.config.schema import Collection, Config

_READING = ("as pulls of what is named",)


@dataclass(frozen=True, slots=True)
class Row:
    """One route, whose it is (`""`: no collection's), and the roles it asks for: of a bundle's pull, those of
    all its members."""

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
    further problems, and raises ConfigError. If `strict`, a file with warnings is not accepted."""
    try:
        value = read_file(Path(path))
    except ConfigError as error:
        return False, str(error)  # which names the file
    try:
        config = parse(value, environ, folder=os.path.dirname(path))
        validate(config)
    except ConfigError as error:
        return False, "\n".join(
            [f"{path}: {pluralize(error.problems, 'problem')}", "", *_problem_lines(error.problems)]
        )
    warnings = lint(config, environ, value)
    accepted = not (strict and warnings)
    verdict = "accepted" if accepted else "refused, as warnings count as problems (--strict)"
    return accepted, f"{path}: {verdict}\n\n{report(config, warnings)}"


def report(config: Config, warnings: Sequence[Problem] | None = None) -> str:
    """The warnings and the route table of an accepted configuration, as text without a final line break."""
    warnings = lint(config) if warnings is None else warnings
    lines = [*format_problems(warnings, "warning"), ""] if warnings else []
    routes = [
        (route.method, route.path, route.collection, _roles_text(route)) for route in routes_table(config)
    ]
    return "\n".join(lines + align_columns([("METHOD", "PATH", "COLLECTION", "ROLES"), *routes]))


def format_problems(problems: Sequence[Problem], noun: str) -> list[str]:
    """The problems as lines, under how many there are."""
    return [pluralize(problems, noun), "", *_problem_lines(problems)]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, their columns level; the last column may be of any length."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return [line.rstrip() for line in lines]


def routes_table(config: Config) -> list[Row]:
    """The routes that are served, in the order of the file, under the mount path and their namespace; last
    those of the whole service. Probes and metrics are left out."""
    mount, batched = config.server.mount_path, {events.collection for events in config.events}
    rows: list[Row] = []
    for name, _, collections in config.each_namespace():
        prefix = f"{mount}/{name}" if name else mount
        rows += _routes(prefix, collections, batched)
        rows.append(Row("GET", f"{prefix}/batch/pull", "", _READING))
        if collections:
            rows.append(Row("GET", f"{prefix}/events", "", _READING))
        if config.config_endpoint is not None:
            is_open = config.config_endpoint.auth == "public"
            shown_to = "public" if is_open else "public (filtered by roles)"
            rows.append(Row("GET", f"{prefix}/config", "", (shown_to,)))
    rows.append(Row("POST", f"{mount}/revocations", "", ("public (a signed list)",)))
    rows.append(Row("GET", f"{mount}/revocations/{{issuer}}", "", ("public",)))
    rows.append(Row("GET", f"{mount}/openapi.json", "", ("public",)))
    return rows


def _routes(prefix: str, collections: Iterable[Collection], batched: set[str]) -> Iterator[Row]:
    bundles: dict[str, list[Collection]] = {}
    for collection in collections:
        key, roles = collection.storage_path, _display_roles(collection, collection.read_roles)
        label = collection.name + (" (events)" if collection.name in batched else _kind(collection))
        if collection.bundle is not None:
            bundles.setdefault(collection.bundle, []).append(collection)
            key = f"{key}/{collection.name}"
        elif not collection.push_only:
            yield Row("GET", f"{prefix}/pull/{key}", label, roles)
        if not collection.pull_only:
            roles_to_write = _display_roles(collection, collection.write_roles)
            yield Row("POST", f"{prefix}/push/{key}", label, roles_to_write)
        if collection.listable:
            yield Row("GET", f"{prefix}/list/{key}".rpartition("/")[0], label, roles)
    for members in bundles.values():
        readable = [member for member in members if not member.push_only]
        names = ", ".join(member.name for member in readable)
        roles = tuple(dict.fromkeys(role for member in readable for role in member.read_roles))
        if readable:
            yield Row("GET", f"{prefix}/pull/{members[0].storage_path}", names, roles)


def _kind(collection: Collection) -> str:
    """What it holds, where that is not documents alone."""
    if collection.append_only is not None:
        return " (log)"
    if not file_types(collection):
        return ""
    return " (documents, files)" if accepts_json(collection) else " (files)"


def _display_roles(collection: Collection, roles: tuple[str, ...]) -> tuple[str, ...]:
    """The roles as a reader of the table should understand them."""
    if collection.require_auth is True:
        roles = tuple("public (signed)" if role == "public" else role for role in roles)
    if collection.root_only:
        roles = tuple(f"{role} + device:root" for role in roles)
    return roles


def _roles_text(route: Row) -> str:
    return ", ".join(route.roles) or "nobody"


def pluralize(items: Sequence[object], noun: str) -> str:
    """`1 warning`, `2 warnings`."""
    return f"{len(items)} {noun}" + ("" if len(items) == 1 else "s")


def _problem_lines(problems: Sequence[Problem]) -> list[str]:
    return ["  " + line for line in align_columns([(found.location, found.message) for found in problems])]
