"""Key templates: `users/{identity}/notes/{id}`. Literal segments, and whole segments that are parameters."""

import re
from collections.abc import Iterator

LITERAL = re.compile(r"[A-Za-z0-9._:@-]+")
PARAM = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
RESERVED = "_pysync"
"""Keys that start so are the server's own."""


def params(template: str) -> tuple[str, ...]:
    """The names of the parameters, in order."""
    return tuple(match[1] for segment in template.split("/") if (match := PARAM.fullmatch(segment)))


def shape(template: str) -> str:
    """The template without its parameters' names: two templates of one shape match the same keys."""
    return "/".join("{}" if PARAM.fullmatch(segment) else segment for segment in template.split("/"))


def faults(template: str) -> Iterator[str]:
    """What keeps the text from being a key template (wire section 1), nothing for a good one."""
    if template.startswith("/") or template.endswith("/"):
        yield "must not start or end with a slash"
    if "//" in template:
        yield "must not hold an empty segment"
    if template.startswith(RESERVED):
        yield f"must not start with {RESERVED}, the server's own keys"
    for segment in filter(None, template.split("/")):
        if segment in (".", ".."):
            yield f"must not hold the segment {segment!r}"
        elif not LITERAL.fullmatch(segment) and not PARAM.fullmatch(segment):
            yield f"segment {segment!r} is neither a {{name}} nor made of A-Z a-z 0-9 . _ : @ -"
    names = params(template)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"repeats the parameter {{{name}}}"
