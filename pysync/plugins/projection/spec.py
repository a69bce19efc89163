"""Projections: the writes that they read, the list that an entry belongs to, and the entry. From code or the
configuration."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from pysync import _core, config
from pysync.concurrency import ATTEMPTS
from pysync.config import key_templates
from pysync.config.key_templates import KeyTemplate
from pysync.config.plugin_validation import OBJECT_REFERENCE, projection_name
from pysync.model import WriteEvent
from pysync.plugins.loader import import_object

Target = Callable[[WriteEvent], str | None]
"""Returns the key of the list that a write belongs to; None for no list."""
Project = Callable[[WriteEvent], Mapping[str, Any] | None]
"""`{"id", "value"}` puts an entry, `{"id", "remove": True}` takes it away, None does neither."""


class EntryChange(NamedTuple):
    """The change that a write makes to a list: the new `entry` under `id`; None removes it."""

    id: str
    entry: Mapping[str, Any] | None


class ProjectionSpec:
    """A list that the server derives from writes to other collections.

    `source` names these collections: `notes` in any namespace, `acme/notes` in one, `/notes` at the root.
    `target` is the list's key, a template of the write's path parameters or a function that returns the key.
    `project` is a pure function. Both may be called any number of times for each state of a source. A list
    with `max_items` entries accepts no more. A write that conflicts is retried up to `max_retries` times.
    With `wait`, pushes return once the list contains them, or after 5 s. `name` defaults to a template's text
    or a function's name. Raises ValueError for an invalid target.
    """

    def __init__(
        self,
        source: str | Sequence[str],
        target: str | Target,
        project: Project,
        *,
        name: str | None = None,
        max_items: int | None = None,
        max_retries: int = ATTEMPTS,
        wait: bool = False,
    ) -> None:
        self.sources = frozenset([source] if isinstance(source, str) else source)
        self.target = target
        self.target_template = KeyTemplate.of(target) if isinstance(target, str) else None
        """None if a function computes the key."""
        self.project = project
        default = target if isinstance(target, str) else getattr(target, "__name__", "projection")
        self.name: str = name or default
        self.max_items = max_items
        self.max_retries = max_retries
        self.wait = wait
        if isinstance(target, str):
            for fault in key_templates.errors(target):
                raise ValueError(f"projection {self.name}: target {fault}")

    def reads(self, namespace: str | None, collection: str) -> bool:
        """Return True if the collection is one of the sources."""
        return is_source(self.sources, namespace, collection)

    def target_key(self, event: WriteEvent) -> str | None:
        """Return the key of the list that the write belongs to, without checking the result of a target
        function."""
        if isinstance(self.target, str):
            return format_key(self.target, event.params)
        return self.target(event)

    def entry_change(self, event: WriteEvent) -> EntryChange | None:
        """Return the change that the write makes to its list. Raises the errors of `project`, and ValueError,
        TypeError or a PysyncError for a result that a list cannot hold."""
        result = self.project(event)
        if result is None:
            return None
        id_ = result.get("id")
        if not isinstance(id_, str):
            raise ValueError("project returned no id that is a string")
        if event.removed or result.get("remove") is True:
            return EntryChange(id_, None)
        value = result.get("value")
        if not isinstance(value, Mapping):
            raise ValueError("project returned no value that is an object")
        # As the list will hold it: with numbers and depth as documents have them, so that it can be compared.
        text = orjson.dumps({"id": id_, "value": value})
        held = _core.decode_push(b'{"data":{"items":[%b]}}' % text)
        return EntryChange(id_, orjson.loads(held.data)["items"][0])


def is_source(names: Container[str], namespace: str | None, collection: str) -> bool:
    """Return True if one of the names, as `source` has them, means the collection."""
    return collection in names or f"{namespace or ''}/{collection}" in names


def format_key(text: str, params: Mapping[str, str]) -> str:
    """Return the text with each `{name}` replaced by that parameter. Raises KeyError."""
    return key_templates.PARAM.sub(lambda name: params[name[1]], text)


_MISSING: Final = object()


def spec_from_config(section: config.ProjectionConfig) -> ProjectionSpec:
    """Return the projection that a member of `projections` declares. Raises ValueError if it names code that
    does not exist."""
    target: str | Target = section.target
    if OBJECT_REFERENCE.fullmatch(section.target):
        target = _function(section.target)
    project = _mapping(section) if section.project is None else _function(section.project)
    return ProjectionSpec(
        section.source,
        target,
        project,
        name=projection_name(section),
        max_items=section.max_items,
        max_retries=section.max_retries,
        wait=section.wait,
    )


def _function(named: str) -> Callable[[WriteEvent], Any]:
    function: Callable[[WriteEvent], Any] = import_object(named)
    if not callable(function):
        raise ValueError(f"{named} is no function")
    return function


def _mapping(section: config.ProjectionConfig) -> Project:
    """Return `id`, `value` and `removeWhen` as a function."""
    id_ = section.id or ""
    members = {name: _pointer_segments(pointer) for name, pointer in section.value.items()}
    removed = [
        (_pointer_segments(pointer), _canonical(value)) for pointer, value in section.remove_when.items()
    ]

    def project(event: WriteEvent) -> Mapping[str, Any]:
        data = event.body
        entry_id = format_key(id_, event.params)
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


def _pointer_segments(pointer: str) -> list[str]:
    """Return the segments of a JSON pointer; `/` alone has none and refers to the whole value."""
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
    """Return equal bytes for equal JSON values."""
    return _core.canonicalize(orjson.dumps(value))
