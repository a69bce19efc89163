"""The router, which maps a method and path to a handler and its path parameters.

A path is matched decoded, segment by segment, so that the matched segments are those that the store sees. A
percent-encoded `/` never becomes a separator (docs/reference/protocol.md#paths-and-keys).
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from aiohttp import web

from pysync.auth.policy import AccessPolicy
from pysync.config.key_templates import MAX_KEY_BYTES, RESERVED, KeyTemplate, is_parameter
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.files import FileSettings
from pysync.errors import InvalidPathParameter, MethodNotAllowed, NotFound
from pysync.model import Caller
from pysync.quotas.accounts import ChargeOfCaller
from pysync.server.http.responses import Response

Handler = Callable[[web.BaseRequest, "Match"], Awaitable[Response]]
Validator = Callable[[bytes], None]
"""A check of `data`, which is JSON text."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path template. `action` and `collection` are its labels in metrics; `policy` is None
    for routes that belong to no collection."""

    handler: Handler
    template: tuple[str, ...] = ()
    param_names: tuple[str, ...] = ()
    action: str = ""
    collection: str = ""
    policy: AccessPolicy | None = None
    key_from: int = 0
    """Number of leading segments (mount, namespace, action) that are not part of the document key."""
    read_headers: str = ""
    """Caching headers of every read."""
    validator: Validator | None = None
    """Check that pushed data must pass."""
    keyrings: tuple[KeyTemplate, ...] | None = None
    """Templates of keyrings in a collection that accepts only sealed data; None for other collections."""
    files: FileSettings | None = None
    """Settings of the collection's files; None if it stores none."""
    charge_of: ChargeOfCaller | None = None
    """Gives what a write to it counts as; None if usage is not tracked."""
    alias: bool = False
    """True if this is another route at an additional path."""
    members: tuple[AccessPolicy, ...] = ()
    """The policies for pulls of a bundle's members. `policy` is then that of the bundle as a whole."""


class Match(NamedTuple):
    """The route of a request, the values of its parameters in the template's order, and its key."""

    route: Route
    values: tuple[str, ...]
    key: str
    policy: AccessPolicy
    """The policy of the route. Only handlers of a collection's routes use it; other routes have none."""

    @property
    def params(self) -> dict[str, str]:
        """The path parameters by name."""
        return dict(zip(self.route.param_names, self.values))  # noqa: B905 (costs more than the rest)

    def write_context(self, caller: Caller) -> WriteContext:
        """Return the context of a write of `caller` to this path."""
        policy, charge_of = self.policy, self.route.charge_of
        charge = None if charge_of is None else charge_of(self.values, caller)
        ref = DocumentRef(policy.collection.name, self.params, policy.namespace, self.key)
        return WriteContext(ref, caller.identity, charge)

    @property
    def identity(self) -> str | None:
        """The `{identity}` of the path, None if the template has none."""
        index = self.policy.identity_index
        return None if index is None else self.values[index]


@dataclass(slots=True)
class _Node:
    literals: dict[str, "_Node"] = field(default_factory=dict)
    parameter: "_Node | None" = None
    routes: dict[str, Route] = field(default_factory=dict)


class Router:
    """All routes of a service. Literal segments take precedence over parameters."""

    def __init__(self) -> None:
        self._root = _Node()
        self._heads: list[list[str]] = []

    def add(self, methods: Iterable[str], route: Route) -> None:
        """Register `route` for these methods at its template, in which `{name}` segments are parameters."""
        node = self._root
        for segment in route.template:
            if segment.startswith("{"):
                node.parameter = node.parameter or _Node()
                node = node.parameter
            else:
                node = node.literals.setdefault(segment, _Node())
        for method in methods:
            node.routes[method] = route
        if route.param_names:
            self._heads.append(list(route.template[: route.key_from]))

    def __iter__(self) -> Iterator[tuple[str, Route]]:
        """Yield every method with its route."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            yield from node.routes.items()
            nodes += node.literals.values()
            if node.parameter is not None:
                nodes.append(node.parameter)

    def match(self, method: str, path: str) -> Match:
        """Return the match of `path`, which is as received, without the query. Raises InvalidPathParameter if
        the key is too long or a segment is not allowed, NotFound, and MethodNotAllowed."""
        segments = path.split("/") if "%" not in path else _decode(path)
        values: list[str] = []
        node = _walk(self._root, segments, values) or _search(self._root, segments, 1, values)
        if node is None:
            head = next((head for head in self._heads if segments[1 : len(head) + 1] == head), None)
            if head is not None and not all(map(is_parameter, segments[len(head) + 1 :])):
                raise InvalidPathParameter
            raise NotFound
        route = node.routes.get(method)
        if route is None:
            allowed = {*node.routes, "HEAD"} if "GET" in node.routes else node.routes
            raise MethodNotAllowed(headers={"Allow": ", ".join(sorted(allowed))})
        key = "/".join(segments[route.key_from + 1 :])
        if values:
            _check(values, key, segments[route.key_from + 1])
        return Match(route, tuple(values), key, route.policy)  # type: ignore[arg-type]


def _walk(node: _Node, segments: Sequence[str], values: list[str]) -> _Node | None:
    """Return the node that a walk reaches that prefers literals and does not backtrack, which is seldom
    needed. Return None and leave `values` empty if it reaches none."""
    for segment in segments[1:]:
        found = node.literals.get(segment)
        if found is None:
            found = node.parameter
            if found is None:
                values.clear()
                return None
            values.append(segment)
        node = found
    if node.routes:
        return node
    values.clear()
    return None


def _search(node: _Node, segments: Sequence[str], index: int, values: list[str]) -> _Node | None:
    """Return the node of `segments` from `index` on, with backtracking; literals are tried first."""
    if index == len(segments):
        return node if node.routes else None
    segment = segments[index]
    literal = node.literals.get(segment)
    if literal is not None:
        found = _search(literal, segments, index + 1, values)
        if found is not None:
            return found
    if node.parameter is None:
        return None
    values.append(segment)
    found = _search(node.parameter, segments, index + 1, values)
    if found is None:
        values.pop()
    return found


def _check(values: Sequence[str], key: str, first: str) -> None:
    if len(key) > MAX_KEY_BYTES or first == RESERVED or not all(map(is_parameter, values)):
        raise InvalidPathParameter


def _decode(path: str) -> list[str]:
    try:
        segments = [unquote_to_bytes(segment).decode() for segment in path.split("/")]
    except UnicodeDecodeError:
        raise InvalidPathParameter from None
    if any("/" in segment for segment in segments):
        raise InvalidPathParameter
    return segments
