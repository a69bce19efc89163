"""Key templates such as `users/{identity}/notes/{id}`: each segment is literal or a parameter."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Generic, TypeVar

T = TypeVar("T")

LITERAL = re.compile(r"[A-Za-z0-9._:@-]+")
PARAM = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
RESERVED = "_pysync"
"""Keys that start with this are the server's own."""

MAX_KEY_BYTES = 1000
MAX_PARAMETER_BYTES = 255

is_parameter = re.compile(r"(?!\.$)(?!.*\.\.)[A-Za-z0-9._:@-]{1,255}").fullmatch
"""Matches a valid value of a path parameter (docs/reference/protocol.md#paths-and-keys)."""
_PARAMETER_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:@-"


@dataclass(frozen=True, slots=True)
class KeyTemplate:
    """A parsed key template. `KeyTemplate.of` caches what it parses."""

    text: str
    segments: tuple[str, ...] = field(init=False, compare=False, repr=False)
    params: tuple[str, ...] = field(init=False, compare=False, repr=False)
    """The names of the parameters, in order."""
    params_at: tuple[tuple[int, str], ...] = field(init=False, compare=False, repr=False)
    """The positions of the segments that are parameters, with their names."""
    open_segments: tuple[bool, ...] = field(init=False, compare=False, repr=False)
    """For each segment True if it is a parameter. Of the templates that match a key the smallest wins it."""
    shape: str = field(init=False, compare=False, repr=False)
    """The template without its parameters' names: two templates of one shape match the same keys."""
    prefix: str = field(init=False, compare=False, repr=False)
    """The literal segments before the first parameter; the key itself if there is none."""

    def __post_init__(self) -> None:
        segments = tuple(self.text.split("/"))
        names = [(at, found[1]) for at, part in enumerate(segments) if (found := PARAM.fullmatch(part))]
        params_at = dict(names)
        shape = ["{}" if at in params_at else part for at, part in enumerate(segments)]
        set_ = object.__setattr__
        set_(self, "segments", segments)
        set_(self, "params", tuple(name for _, name in names))
        set_(self, "params_at", tuple(names))
        set_(self, "open_segments", tuple(at in params_at for at in range(len(segments))))
        set_(self, "shape", "/".join(shape))
        set_(self, "prefix", "/".join(segments[: names[0][0] if names else None]))

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, text: str) -> "KeyTemplate":
        """Return the template of this text, which need not be valid."""
        return cls(text)

    @property
    def ends_in_param(self) -> bool:
        """True if the last segment is a parameter."""
        return self.open_segments[-1]

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the key with these values of the parameters, which are not validated. Raises KeyError if one
        is missing."""
        return self.text.format_map(values)

    def folder(self, values: Mapping[str, str]) -> str:
        """Return the key at or below which all keys with these values are: the segments before the first
        parameter that has none."""
        names = dict(self.params_at)
        filled = [values.get(names[at]) if at in names else part for at, part in enumerate(self.segments)]
        return "/".join(part for part in takewhile(bool, filled) if part)

    def matches(self, key: str) -> bool:
        """Return True if the key has the template's shape, whatever the values of its parameters."""
        parts = key.split("/")
        if len(parts) != len(self.segments):
            return False
        for at, name in self.params_at:
            parts[at] = f"{{{name}}}"
        return "/".join(parts) == self.text

    def params_of(self, key: str) -> dict[str, str]:
        """Return the values of the parameters in a key that the template matches."""
        segments = key.split("/")
        return {name: segments[at] for at, name in self.params_at}

    def overlaps(self, other: "KeyTemplate") -> bool:
        """Return True if a key can match both templates."""
        return len(self.segments) == len(other.segments) and all(
            is_open or other_is_open or part == other_part
            for part, is_open, other_part, other_is_open in zip(
                self.segments, self.open_segments, other.segments, other.open_segments, strict=True
            )
        )

    def shadows(self, own: "KeyTemplate") -> bool:
        """Return True if some keys match both templates and belong to this one: at the first difference the
        literal segment wins."""
        return self.open_segments < own.open_segments and self.overlaps(own)


def errors(template: str) -> Iterator[str]:
    """Yield the reasons why the text is not a valid key template; nothing for a valid one.

    See docs/reference/protocol.md#paths-and-keys.
    """
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
    names = KeyTemplate.of(template).params
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"repeats the parameter {{{name}}}"


def are_parameters(names: Sequence[str]) -> bool:
    """Return True if all `names`, which are segments of keys, are valid values of a path parameter."""
    longest = len(max(names, key=len, default=""))
    joined = "/".join(names)
    is_plain = ".." not in joined and not joined.encode().translate(None, _PARAMETER_BYTES + b"/")
    return is_plain and longest <= MAX_PARAMETER_BYTES


def resolve_document_key(template: str, values: Mapping[str, str]) -> str:
    """Return the key of a document or file: `template` with each parameter replaced by its value.

    Raises ValueError with everything that is wrong: an invalid template, a value that is missing, superfluous
    or not allowed in a path, a key longer than `MAX_KEY_BYTES`, or one that is reserved
    (docs/reference/protocol.md#paths-and-keys).
    """
    wrong = [f"the template {message}" for message in errors(template)]
    names = KeyTemplate.of(template).params
    wrong += [f"the parameter {{{name}}} has no value" for name in names if name not in values]
    wrong += [f"{name!a} is no parameter of the template" for name in values if name not in names]
    wrong += [
        f"{{{name}}} must be 1 to {MAX_PARAMETER_BYTES} of A-Z a-z 0-9 . _ : @ -, not . and without .."
        for name in names
        if name in values and not (isinstance(values[name], str) and is_parameter(values[name]))
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    key = KeyTemplate.of(template).fill(values)
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, more than {MAX_KEY_BYTES}")
    if key.partition("/")[0] == RESERVED:
        raise ValueError(f"the key starts with {RESERVED}, the server's own keys")
    return key


class TemplateIndex(Generic[T]):
    """Finds those of many templates that match a key, without trying the others. Each template stands for a
    value."""

    def __init__(self) -> None:
        self._next: dict[str, TemplateIndex[T]] = {}
        self._any: TemplateIndex[T] | None = None
        self._here: list[tuple[KeyTemplate, T]] = []

    def add(self, template: KeyTemplate, value: T) -> None:
        """Add a template and the value that it stands for."""
        node = self
        for segment, is_open in zip(template.segments, template.open_segments, strict=True):
            if is_open:
                node._any = node = node._any or TemplateIndex()
            else:
                node = node._next.setdefault(segment, TemplateIndex())
        node._here.append((template, value))

    def find(self, key: str) -> list[tuple[T, dict[str, str]]]:
        """Return the values of the templates that match the key, each with the parameters in the key, in no
        particular order."""
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
        return [(value, template.params_of(key)) for node in nodes for template, value in node._here]
