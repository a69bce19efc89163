"""JSON Schemas that documents must satisfy (`objectSchema`, docs/reference/protocol.md#push-a-document)."""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from pysync.errors import SchemaViolation

Validator = Callable[[bytes], None]


def compile_schema(schema: Mapping[str, Any] | bool) -> Validator:
    """Return a check of `data` (JSON text) that raises SchemaViolation with the `path` (a JSON pointer) and
    the `validator` (the schema keyword) of the first error. Raises ValueError if this is not a JSON
    Schema."""
    import jsonschema_rs

    # Masked: a message must not quote data that its reader may not be allowed to see.
    validator = jsonschema_rs.validator_for(
        schema if isinstance(schema, bool) else dict(schema), offline=True, mask="value"
    )

    def check(data: bytes) -> None:
        try:
            validator.validate(orjson.loads(data))
        except jsonschema_rs.ValidationError as error:
            keyword = str(error.schema_path[-1]) if error.schema_path else "schema"
            raise SchemaViolation(
                f"Schema validation failed: {error.message}",
                extras={"path": _pointer(error.instance_path), "validator": keyword},
            ) from None

    return check


def _pointer(path: list[str | int]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
