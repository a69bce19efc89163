"""Imports point down, never up or sideways, and heavy dependencies have one home (docs/architecture.md)."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pysync"


def layers() -> dict[str, int]:
    """Module or package below pysync -> its layer, 0 at the top, as docs/architecture.md draws it."""
    page = (ROOT / "docs/architecture.md").read_text()
    drawing = page.split("checks it.")[1].split("\n\n")[1]
    return {
        name: level for level, line in enumerate(drawing.splitlines()) for name in re.findall(r"\w+", line)
    }


def imports(path: Path) -> set[str]:
    """The modules that a file imports, as dotted names."""
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


def test_heavy_dependencies_have_one_home() -> None:
    homes = {
        "aiohttp.web": ("server/",),
        "sqlite3": (
            "sqlite/",
            "store/local/",
            "coordinator/local.py",
        ),
        "cryptography": ("auth/signing.py", "client/sealed/crypto.py"),
        "jsonschema_rs": ("server/json_schema.py", "config/"),
        "yaml": ("config/",),
        "aiobotocore": ("store/s3/",),
        "botocore": ("store/s3/",),
        "hiredis": ("coordinator/redis/",),
        "redis": ("coordinator/redis/",),
        "uvloop": ("server/serve.py", "cli/bench.py"),
        "prometheus_client": ("server/metrics.py",),
        "duckdb": ("parquet/", "cli/"),
    }
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for dotted in imports(path):
            for module, allowed in homes.items():
                if dotted == module or dotted.startswith(module + "."):
                    assert name.startswith(allowed), f"{name} imports {dotted}"
