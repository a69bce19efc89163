"""Thresholds, and private names of aiohttp, are few enough to hold in mind: `budget.py` bounds them."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import budget

PACKAGE = Path(__file__).parents[2] / "pysync"
NUMBER = re.compile(r"^_?[A-Z][A-Z0-9_]*(?:: *[\w\[\], .]+)? = -?\(?[0-9]", re.M)
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def test_numeric_constants_are_no_more_than_the_budget_allows() -> None:
    found = {path: len(NUMBER.findall(path.read_text())) for path in PACKAGE.rglob("*.py")}
    number = sum(found.values())
    assert number <= budget.CONSTANTS, (
        f"{number} numeric constants, {budget.CONSTANTS} are allowed: take one out that no user would miss, "
        "for example by deriving it from another"
    )


def private(tree: ast.AST, *, of_self: bool) -> Iterator[str]:
    """The private attributes that a piece of code names: those of `self`, or of other objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            if of_self == (ast.unparse(node.value) in ("self", "cls", "super()")):
                yield node.attr
        elif of_self and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:2] != "__":
            yield node.name


def own_names(kind: type) -> set[str]:
    """The private names that a class of aiohttp has: methods, and attributes of its instances."""
    return {
        name
        for base in kind.__mro__
        if base.__module__.partition(".")[0] == "aiohttp"
        for name in (*vars(base), *re.findall(r"\bself\.(_[a-z]\w*)", inspect.getsource(base)))
        if re.match(r"_[a-z]", name)
    }


def private_names_of_aiohttp() -> dict[str, str]:
    """The private names of aiohttp that pysync uses, and a module that uses each.

    The scan finds names of aiohttp's classes that our subclasses use or override, imported names, and private
    attributes of other objects in modules that import aiohttp. It does not find names in strings (`getattr`),
    nor those of classes that are made inside functions.
    """
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if not re.search(r"^\s*(from|import) aiohttp", text, re.M):
            continue
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(text)
        module = importlib.import_module(name)
        names = {*private(tree, of_self=False)} - {*private(tree, of_self=True)} - OF_TUPLES
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiohttp"):
                names |= {alias.name for alias in node.names if alias.name.startswith("_")}
            elif isinstance(node, ast.ClassDef):
                kind = getattr(module, node.name, object)
                names |= own_names(kind) & {*private(node, of_self=True)}
        found.update(dict.fromkeys(names, name))
    return found


def test_private_names_of_aiohttp_are_in_the_budget() -> None:
    found = private_names_of_aiohttp()
    added = {name: where for name, where in found.items() if name not in budget.PRIVATE_NAMES}
    assert not added, f"use aiohttp's public interface, or list in budget.py what these gain: {added}"


def test_scan_finds_the_private_names_of_a_class_of_aiohttp() -> None:
    assert {"_keepalive_timeout", "_current_request", "_parser"} <= own_names(
        aiohttp.web_protocol.RequestHandler
    )
