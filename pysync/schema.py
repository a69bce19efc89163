"""JSON Schemas that documents must satisfy (`objectSchema`, wire section 10)."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from pysync.errors import SchemaViolation

Check = Callable[[bytes], None]


def compile_schema(schema: Mapping[str, Any] | bool) -> Check:
    """A check of `data` (JSON text) that raises SchemaViolation with the `path` (a JSON pointer) and the
    `validator` (the schema's keyword) of the first fault. Raises ValueError for what is not a JSON Schema."""
    import jsonschema_rs

    validator = jsonschema_rs.validator_for(
        schema if isinstance(schema, bool) else dict(schema), offline=True
    )

    def check(data: bytes) -> None:
        error = next(validator.iter_errors(orjson.loads(data)), None)
        if error is None:
            return
        keyword = str(error.schema_path[-1]) if error.schema_path else "schema"
        raise SchemaViolation(
            f"Schema validation failed: {error.message}",
            extras={"path": _pointer(error.instance_path), "validator": keyword},
        )

    return check


def _pointer(path: list[str | int]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
