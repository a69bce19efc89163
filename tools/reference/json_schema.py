"""The JSON Schema of the configuration file, from the tree: `pysync/config/pysync.schema.json`.

It accepts what the loader converts, with the same types, limits and short spellings. Rules that concern
several members are left to `pysync check`. Draft 7, which editors know.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import orjson

from pysync.config.collection import Collection, ParquetPreset, wire_name
from pysync.config.convert import ENV_REFERENCE, NORMALIZERS
from pysync.config.schema import Config

Schema = dict[str, Any]

_NULL: Final[Schema] = {"type": "null"}


def text() -> str:
    """The schema as JSON text, with a final line break."""
    return orjson.dumps(schema(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


def schema() -> Schema:
    """The schema of a whole configuration file."""
    definitions: dict[str, Schema] = {}
    root = _object(Config, definitions)
    own = {"description": "Path or URL of this schema, for editors. The server ignores it."}
    root["properties"] = {"$schema": own, **root["properties"]}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Configuration of pysync"}
    return {**head, **root, "definitions": dict(sorted(definitions.items()))}


def _object(kind: type, definitions: dict[str, Schema]) -> Schema:
    fields = dataclasses.fields(kind)
    found: Schema = {
        "type": "object",
        "properties": {wire_name(field.name): _member(kind, field, definitions) for field in fields},
        "additionalProperties": False,
    }
    required = [wire_name(field.name) for field in fields if _is_required(field)]
    return {**found, "required": required} if required else found


def _member(kind: type, field: "dataclasses.Field[Any]", definitions: dict[str, Schema]) -> Schema:
    found: Schema = {"description": field.metadata["doc"]}
    if field.default is not dataclasses.MISSING and field.default not in (None, ()):
        found["default"] = field.default
    choices = [*_short_forms(kind, field, definitions), *_values(field.type, field.metadata, definitions)]
    if not _is_required(field):
        choices.append(_NULL)
    return {**found, **_any_of(choices)}


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _short_forms(
    kind: type, field: "dataclasses.Field[Any]", definitions: dict[str, Schema]
) -> Iterator[Schema]:
    """Other spellings of a member, found by asking the loader what it rewrites."""
    rewrite = NORMALIZERS.get((kind, field.name))
    if rewrite is None:
        return
    takes_text = rewrite("text") != "text"
    words = (True, False, 0) if takes_text else (True, False, 0, "none")
    rewritten = [word for word in words if rewrite(word) is not word]
    if rewritten:
        yield {"enum": rewritten}
    if takes_text:
        yield {"type": "string", "minLength": 1}
    if rewrite({}) != {}:
        yield from _values(get_args(field.type)[0], field.metadata, definitions)


def _values(hint: Any, limits: Mapping[str, Any], definitions: dict[str, Schema]) -> Iterator[Schema]:
    """The values that a member of this type takes. A string with a variable stands for a number, a boolean or
    a choice that the environment spells."""
    origin, args = get_origin(hint), get_args(hint)
    variable = {"type": "string", "pattern": ENV_REFERENCE.pattern}
    if origin in (UnionType, Union):
        for arg in args:
            yield from _values(arg, limits, definitions)
    elif hint is NoneType:
        return
    elif origin is Literal:
        yield from ({"enum": list(args)}, variable)
    elif origin is tuple:
        yield {"type": "array", "items": _any_of([*_values(args[0], limits, definitions)])}
    elif origin is Mapping:
        inner = _any_of([*_values(args[1], limits, definitions)])
        yield {"type": "object", "propertyNames": {"minLength": 1}, "additionalProperties": inner}
    elif hint is Collection:
        is_plain = {"properties": {"preset": _NULL}}
        kinds = [_reference(kind, definitions) for kind in (Collection, ParquetPreset)]
        yield {"if": is_plain, "then": kinds[0], "else": kinds[1]}
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield _reference(hint, definitions)
    elif hint is int:
        bounds = {"minimum": limits["at_least"], "maximum": limits["at_most"]}
        yield from ({"type": "integer", **bounds}, variable)
    elif hint is bool:
        yield from ({"type": "boolean"}, variable)
    elif hint is str:
        yield {"type": "string"} if limits["may_be_empty"] else {"type": "string", "minLength": 1}
    else:
        yield {}


def _any_of(choices: list[Schema]) -> Schema:
    """One schema for all choices. Those of different simple types share one, whose keywords each concern
    their own type."""
    simple: Schema = {}
    others = []
    for choice in choices:
        named = choice.get("type")
        if named is None or named in simple.get("type", ()) or (simple.keys() & choice.keys()) - {"type"}:
            others.append(choice)
        else:
            simple = {**simple, **choice, "type": [*simple.get("type", ()), named]}
    if len(simple.get("type", ())) == 1:
        (simple["type"],) = simple["type"]
    found = [each for each in (simple, *others) if each]
    return found[0] if len(found) == 1 else {"anyOf": found} if found else {}


def _reference(kind: type, definitions: dict[str, Schema]) -> Schema:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/definitions/{kind.__name__}"}
