"""Imports point down (docs/explanation/architecture.md), and heavy dependencies have one home."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pysync"


def layers() -> dict[str, int]:
    """Module or package below pysync -> its layer, 0 at the top, as the architecture page draws it."""
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    drawing = page.split("```text\n")[1].split("```")[0]
    return {
        name: level for level, line in enumerate(drawing.splitlines()) for name in re.findall(r"\w+", line)
    }


def imports(path: Path) -> set[str]:
    """The modules that a file imports, as dotted names, and the names that it imports of them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def part(dotted: str) -> str:
    """`pysync.server.app` -> `server`."""
    return dotted.split(".")[1]


def test_imports_point_down() -> None:
    level = layers()
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE).with_suffix("").parts
        if relative in (("__init__",), ("_build",)):
            continue
        own = relative[0]
        assert own in level, f"{own} is not in the drawing"
        for dotted in imports(path):
            if dotted.startswith("pysync.") and part(dotted) in level and part(dotted) != own:
                assert level[part(dotted)] > level[own], (
                    f"{'/'.join(relative)} imports {dotted}, which is above"
                )


def modules() -> dict[str, Path]:
    """Every module of pysync by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_modules(path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules of pysync that a file imports: `from package import module` imports the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module in known:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
    return found


def circle(below: dict[str, set[str]]) -> list[str]:
    """The modules that import each other in a circle, and those that import one of them."""
    while leaves := {name for name, found in below.items() if not found}:
        below = {name: found - leaves for name, found in below.items() if name not in leaves}
    return sorted(below)


@pytest.mark.slow
def test_no_imports_form_a_cycle() -> None:
    """Not inside a package either, and not by imports inside functions."""
    known = modules()
    below = {name: imported_modules(path, known) - {name, "pysync"} for name, path in known.items()}
    assert circle(below) == []


def test_no_modules_of_the_core_use_each_other_in_a_circle() -> None:
    texts = {path.stem: path.read_text() for path in (ROOT / "rust").glob("*.rs")}
    below = {}
    for name, text in texts.items():
        groups = re.findall(r"\bcrate::(?:(\w+)|\{([^}]*)\})", text)
        used = {module for one, many in groups for module in re.findall(r"\w+", one or many)}
        below[name] = used & texts.keys() - {name}
    assert circle(below) == []


@pytest.mark.slow
def test_no_module_uses_private_names_of_another() -> None:
    known = modules()
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        local = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in known:
                for alias in node.names:
                    assert not alias.name.startswith("_") or node.module == "pysync", (
                        f"{name} imports {node.module}.{alias.name}"
                    )
                    if f"{node.module}.{alias.name}" in known:
                        local.add(alias.asname or alias.name)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in local
            ):
                assert not node.attr.startswith("_"), f"{name} uses {node.value.id}.{node.attr}"


@pytest.mark.slow
def test_heavy_dependencies_have_one_home() -> None:
    homes = {
        "aiohttp.web": ("server/",),
        "sqlite3": (
            "sqlite/",
            "store/local/",
            "coordinator/local",
            "client/replica/file.py",
        ),
        "cryptography": ("auth/identity_keys.py", "client/sealed/crypto.py", "backup/encryption.py"),
        "backports": ("backup/format.py",),
        "jsonschema_rs": ("server/routes.py", "config/"),
        "yaml": ("config/",),
        "aiobotocore": ("store/s3/",),
        "botocore": ("store/s3/",),
        "hiredis": ("coordinator/redis/",),
        "redis": ("coordinator/redis/",),
        "uvloop": ("server/process/serve.py", "cli/bench.py"),
        "prometheus_client": ("server/process/exposition.py",),
        "duckdb": ("parquet/", "cli/"),
    }
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for dotted in imports(path):
            for module, allowed in homes.items():
                if dotted == module or dotted.startswith(module + "."):
                    assert name.startswith(allowed), f"{name} imports {dotted}"


@pytest.mark.process
def test_the_server_loads_nothing_that_it_does_not_need() -> None:
    script = (
        "import sys, pysync.server.process.serve, pysync.cli.server\n"
        "import pysync.plugins.events, pysync.store.local\n"
        "print(*sys.modules)"
    )
    heavy = {
        "aiobotocore",
        "cryptography",
        "duckdb",
        "jsonschema_rs",
        "prometheus_client",
        "pyarrow",
        "redis",
        "yaml",
    }
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not heavy & set(ran.stdout.split())


WORDS = re.compile(
    "_(tells?|told|hear(d|ing|er)?|ask(s|ed)?|tally|beat|heal(s|ing)?|doom|intend|lookout|patience|strangers?"
    "|blame|beside|aside|rivals|answers?|refusal)_"
)
"""Words of our own that stood where the field has terms: notify, deliver, query, counters, heartbeat ..."""


def test_definitions_use_the_words_of_the_field() -> None:
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if node.name.startswith("test_"):
                    continue
                words = re.sub(r"([a-z])([A-Z])", r"\1_\2", node.name).lower()
                assert not WORDS.search(f"_{words.replace('_', '__')}_"), (
                    f"{path.relative_to(ROOT)}:{node.lineno} defines {node.name}"
                )


WALL_CLOCK = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\(|\bdatetime\.(now|utcnow|today)\(")


def test_the_time_of_day_is_read_only_where_it_is_meant() -> None:
    """It steps when the clock is set. Timers, windows and heartbeats use `time.monotonic`, the event loop's
    time, or a clock that they are given."""
    meant = {
        "clock.py": "`wall_clock_ms`",
        "server/http/responses.py": "the header Date",
        "server/process/serve.py": "the name of a document in the banner",
        "store/s3/probe.py": "compared with the clock of the bucket",
    }
    reads = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if WALL_CLOCK.search(path.read_text())
    }
    assert {name for name in reads if not name.startswith(("cli/", "client/"))} == set(meant)


def test_no_two_classes_share_a_name() -> None:
    """But for parallel implementations of one idea."""
    parallel = {"LogRange", "RetryPolicy", "Change"}
    seen: dict[str, str] = {}
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in parallel:
                assert node.name not in seen, f"{name} and {seen[node.name]} define {node.name}"
                seen[node.name] = name
