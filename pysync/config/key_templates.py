"""Key templates: `users/{identity}/notes/{id}`. Literal segments, and whole segments that are parameters."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

LITERAL = re.compile(r"[A-Za-z0-9._:@-]+")
PARAM = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
RESERVED = "_pysync"
"""Keys that start so are the server's own."""

MAX_KEY_BYTES = 1000
MAX_PARAMETER_BYTES = 255

is_parameter = re.compile(r"(?!\.$)(?!.*\.\.)[A-Za-z0-9._:@-]{1,255}").fullmatch
"""Whether a text may be the value of a path parameter (wire section 1)."""
_PARAMETER_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:@-"


def params(template: str) -> tuple[str, ...]:
    """The names of the parameters, in order."""
    return tuple(match[1] for segment in template.split("/") if (match := PARAM.fullmatch(segment)))


def normalized(template: str) -> str:
    """The template without its parameters' names: two templates of one shape match the same keys."""
    return "/".join("{}" if PARAM.fullmatch(segment) else segment for segment in template.split("/"))


def matches(template: str, key: str) -> bool:
    """Whether the key has the template's shape, whatever the values of its parameters."""
    parts, segments = template.split("/"), key.split("/")
    return len(parts) == len(segments) and all(
        part == segment or part.startswith("{") for part, segment in zip(parts, segments, strict=True)
    )


def overlap(one: str, other: str) -> bool:
    """Whether a key can have the shape of both."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return one.count("/") == other.count("/") and all(
        left == right or left.startswith("{") or right.startswith("{") for left, right in pairs
    )


def shadows(other: str, own: str) -> bool:
    """Whether some keys have the shape of both templates and belong to `other`: literal segments win, the
    first difference decides."""
    if other.count("/") != own.count("/"):
        return False
    decided = False
    for theirs, ours in zip(other.split("/"), own.split("/"), strict=True):
        is_literal, is_own_literal = not theirs.startswith("{"), not ours.startswith("{")
        if is_literal and is_own_literal and theirs != ours:
            return False
        if is_literal != is_own_literal and not decided:
            if is_own_literal:
                return False
            decided = True
    return decided


def errors(template: str) -> Iterator[str]:
    """What keeps the text from being a key template (wire section 1), nothing for a good one."""
    if template.startswith("/") or template.endswith("/"):
        yield "must not start or end with a slash"
    if "//" in template:
        yield "must not hold an empty segment"
    if template.startswith(RESERVED):
        yield f"must not start with {RESERVED}, the server's own keys"
    for segment in filter(None, template.split("/")):
        if segment == ".":
            yield "must not hold the segment '.'"
        elif ".." in segment:
            yield "must not hold '..'"
        elif not LITERAL.fullmatch(segment) and not PARAM.fullmatch(segment):
            yield f"segment {segment!r} is neither a {{name}} nor made of A-Z a-z 0-9 . _ : @ -"
    names = params(template)
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"repeats the parameter {{{name}}}"


def are_parameters(names: Sequence[str]) -> bool:
    """Whether all `names`, segments of keys as they are, may be values of a path parameter."""
    longest = len(max(names, key=len, default=""))
    joined = "/".join(names)
    is_plain = ".." not in joined and not joined.encode().translate(None, _PARAMETER_BYTES + b"/")
    return is_plain and longest <= MAX_PARAMETER_BYTES


def document_key(segments: Sequence[str], values: Mapping[str, str]) -> str:
    """The segments of a template with its parameters filled in, unchecked."""
    return "/".join(values[part[1:-1]] if part.startswith("{") else part for part in segments)


def resolve_document_key(template: str, values: Mapping[str, str]) -> str:
    """The key of a document, or file: `template` with each parameter replaced by its value (service,
    Columnar file helpers). Raises ValueError with all that is wrong: with the template, with a value that is
    missing, superfluous or none that a path may hold, or with the key, longer than `MAX_KEY_BYTES`."""
    wrong = [f"the template {message}" for message in errors(template)]
    names = params(template)
    wrong += [f"the parameter {{{name}}} has no value" for name in names if name not in values]
    wrong += [f"{name!a} is no parameter of the template" for name in values if name not in names]
    wrong += [
        f"{{{name}}} must be 1 to {MAX_PARAMETER_BYTES} of A-Z a-z 0-9 . _ : @ -, not . and without .."
        for name in names
        if name in values and not (isinstance(values[name], str) and is_parameter(values[name]))
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    key = document_key(template.split("/"), values)
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, more than {MAX_KEY_BYTES}")
    if key.partition("/")[0] == RESERVED:
        raise ValueError(f"the key starts with {RESERVED}, the server's own keys")
    return key


class TemplateIndex(Generic[T]):
    """Which of many templates have the shape of a key, found without looking at the others. Each stands for
    something."""

    def __init__(self) -> None:
        self._next: dict[str, TemplateIndex[T]] = {}
        self._any: TemplateIndex[T] | None = None
        self._here: list[tuple[list[tuple[int, str]], T]] = []

    def add(self, template: str, value: T) -> None:
        node, names = self, list[tuple[int, str]]()
        for at, segment in enumerate(template.split("/")):
            parameter = PARAM.fullmatch(segment)
            if parameter is not None:
                names.append((at, parameter[1]))
                node._any = node = node._any or TemplateIndex()
            else:
                node = node._next.setdefault(segment, TemplateIndex())
        node._here.append((names, value))

    def find(self, key: str) -> list[tuple[T, dict[str, str]]]:
        """Return the keys that these templates stand for, each with the values of its parameters, in no
        order."""
        segments, nodes = key.split("/"), [self]
        for segment in segments:
            found = []
            for node in nodes:
                literal = node._next.get(segment)
                if literal is not None:
                    found.append(literal)
                if node._any is not None:
                    found.append(node._any)
            nodes = found
        return [
            (value, {name: segments[at] for at, name in names})
            for node in nodes
            for names, value in node._here
        ]
