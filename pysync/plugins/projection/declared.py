"""Projections that the configuration declares (wire section 10)."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from pysync import _core, config
from pysync.config.projections import OBJECT_OF_MODULE, projection_name
from pysync.model import WriteEvent
from pysync.plugins.loading import resolved
from pysync.plugins.projection.definition import Project, Projection, Target, filled

_MISSING: Final = object()


def declared(said: config.Projection) -> Projection:
    """The projection that a member of `projections` declares. Raises ValueError where it names code that is
    not there."""
    target: str | Target = said.target
    if OBJECT_OF_MODULE.fullmatch(said.target):
        target = _function(said.target)
    project = _mapping(said) if said.project is None else _function(said.project)
    return Projection(
        said.source,
        target,
        project,
        name=projection_name(said),
        max_items=said.max_items,
        max_retries=said.max_retries,
        wait=said.wait,
    )


def _function(named: str) -> Callable[[WriteEvent], Any]:
    function: Callable[[WriteEvent], Any] = resolved(named)
    if not callable(function):
        raise ValueError(f"{named} is no function")
    return function


def _mapping(said: config.Projection) -> Project:
    """`id`, `value` and `removeWhen` as a function."""
    id_ = said.id or ""
    members = {name: _steps(pointer) for name, pointer in said.value.items()}
    removed = [(_steps(pointer), _canonical(value)) for pointer, value in said.remove_when.items()]

    def project(event: WriteEvent) -> Mapping[str, Any]:
        data = event.body
        entry_id = filled(id_, event.params)
        if removed and all(
            (found := _at(data, steps)) is not _MISSING and _canonical(found) == value
            for steps, value in removed
        ):
            return {"id": entry_id, "remove": True}
        pointed = {name: _at(data, steps) for name, steps in members.items()}
        return {
            "id": entry_id,
            "value": {name: value for name, value in pointed.items() if value is not _MISSING},
        }

    return project


def _steps(pointer: str) -> list[str]:
    """The steps of a JSON pointer; `/` alone takes none: it is the whole."""
    if pointer == "/":
        return []
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer[1:].split("/")]


def _at(value: Any, steps: list[str]) -> Any:
    for step in steps:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and _is_index(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return _MISSING
    return value


def _is_index(step: str) -> bool:
    return step == "0" or (step.isascii() and step.isdigit() and step[0] != "0" and len(step) < 10)


def _canonical(value: Any) -> bytes:
    """Equal for equal JSON values."""
    return _core.canonicalize(orjson.dumps(value))
