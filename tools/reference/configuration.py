"""`docs/reference/configuration.md`, from the configuration's tree and the documentation of its fields."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import orjson

from pysync.config.collection import Collection, ParquetPreset, wire_name
from pysync.config.convert import NORMALIZERS
from pysync.config.loader import ENVIRONMENT
from pysync.config.schema import Config
from pysync.protocol import MAX_INT

HEAD = """\
# Configuration

Generated from the configuration tree by `make reference`.

The configuration is one file: JSON, YAML or TOML, told apart by its name. `pysync check FILE` prints every
problem that it has, or warnings and the route table. Unknown members are errors. `null` is the same as
leaving a member out.

- `${NAME}` in any string is replaced by that environment variable, which must exist. It may stand for a
  number or a boolean: `"workers": "${WORKERS}"`.
- A few [environment variables](#environment-variables) override the file; an empty one counts as unset. The
  flags of [`pysync serve`](command-line.md#pysync-serve) override both.
- Files and folders that the file names (`server.examples`) are relative to the file. The folders of `store`
  and `coordinator` are relative to the directory in which the server is started, as are those in variables.
- A [reload](../how-to/change-the-configuration.md) applies changes while the server runs. Those of a member
  that is marked *Restart*, or is inside one, it refuses.
- A key template such as `users/{identity}/notes/{id}` consists of segments of letters, digits and `. _ : @
  -`, and of whole segments `{name}`. Keys that start with `_pysync` belong to the server.
- Only requests that a collection's own `rateLimit` meters are limited. The nearest rule that names a limit
  counts, and members that it leaves out come from the next one: the collection's for the action, the
  collection's, the server's for the action, the server's.
- [Roles](protocol.md#roles): `public` (everyone), `self` (the caller is `{identity}`), `cap:read:NAME`,
  `cap:write:NAME`, `cap:list:NAME` (a certificate for collection NAME), `delegated:ISSUER:NAME`,
  `delegated:{identity}:NAME` (a certificate for NAME that the user `{identity}` has issued), `device:root`,
  `admin:USER`, `admin` (the admin token), `space:owner`, `space:member`, and those of
  `identityRoles` and plugins.

## JSON Schema

The JSON Schema of the file lets editors complete members and mark mistakes. `pysync check --json-schema`
prints it, and the installed package has it at `pysync/config/pysync.schema.json`. Name it at the top of the
file:

    pysync check --json-schema > pysync.schema.json

```json
{
  "$schema": "./pysync.schema.json",
  "collections": []
}
```

The loader ignores `$schema`. The schema knows each member by itself; `pysync check` also finds members that
do not fit together.
"""


VARIABLES = """\
These variables override a member of the file, or set it if there is no file. Any other member takes its
value from a variable that the file names, as `${NAME}`. One that begins with `PYSYNC_` and that nothing reads
is a warning of `pysync check` and `pysync serve`.
"""

CONFIG_ROW = (
    "| `PYSYNC_CONFIG` | the file itself, as `--config` "
    "(default: `./pysync.json`, `.yaml`, `.yml` or `.toml`, "
    "if one of them exists; several are an error) |\n"
)


def page() -> str:
    """The whole page, with a final line break."""
    sections = [_section(kind) for kind in _objects(Config, [])]
    names = "".join(f"| `{variable}` | `{path}` |\n" for variable, path in ENVIRONMENT.items())
    rows = f"| Variable | Member |\n|---|---|\n{CONFIG_ROW}{names}"
    environment = f"## Environment variables\n\n{VARIABLES}\n{rows}"
    return "\n".join([HEAD, *sections, environment])


def _objects(kind: type, found: list[type]) -> list[type]:
    """`kind` and every object below it, each once, in the order in which the tree names them."""
    if kind not in found:
        found.append(kind)
        for field in dataclasses.fields(kind):
            for inner in _kinds(field.type):
                _objects(inner, found)
    return found


def _kinds(hint: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    if hint is Collection:
        yield ParquetPreset
    for inner in get_args(hint):
        yield from _kinds(inner)


def _section(kind: type) -> str:
    title = "The file" if kind is Config else _title(kind)
    rows = "".join(_row(kind, field) for field in dataclasses.fields(kind))
    return f"## {title}\n\n| Member | Type | Default | Meaning |\n|---|---|---|---|\n{rows}"


def _row(kind: type, field: "dataclasses.Field[Any]") -> str:
    meaning = field.metadata["doc"] + (" Kept out of logs." if field.metadata["secret"] else "")
    meaning += " *Restart*." if field.metadata["restart"] else ""
    values = _type(field.type, field.metadata)
    if _takes_one(kind, field):
        values = f"{_type(get_args(field.type)[0], field.metadata)} or {values}"
    cells = (f"`{wire_name(field.name)}`", values, _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _takes_one(kind: type, field: "dataclasses.Field[Any]") -> bool:
    """Return True if the loader makes a list of a single value."""
    rewrite = NORMALIZERS.get((kind, field.name))
    return rewrite is not None and (rewrite("text") == ["text"] or rewrite({}) == [{}])


def _type(hint: Any, limits: Mapping[str, Any]) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(_type(arg, limits) for arg in args if arg is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{orjson.dumps(arg).decode()}`" for arg in args)
    if origin is tuple:
        return f"list of {_type(args[0], limits)}"
    if origin is not None:
        return f"name → {_type(args[1], limits)}"
    if hint is Collection:
        return f"{_link(Collection)} or {_link(ParquetPreset)}"
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _link(hint)
    if hint is int:
        least, most = limits["at_least"], limits["at_most"]
        return f"integer, {least} or more" if most == MAX_INT else f"integer, {least} to {most}"
    return {str: "string", bool: "boolean"}.get(hint, "any value")


def _link(kind: type) -> str:
    return f"[{_title(kind)}](#{_title(kind).lower().replace(' ', '-')})"


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return ""
    if field.default is dataclasses.MISSING:
        return "required"
    return "" if field.default in (None, ()) else f"`{orjson.dumps(field.default).decode()}`"


def _title(kind: type) -> str:
    """The class name as words: `Rate rule`."""
    words = "".join(
        f" {letter.lower()}" if letter.isupper() else letter
        for letter in kind.__name__.removesuffix("Config")
    )
    return words.strip().capitalize()
