"""Generate the pages of `docs/reference/` that the code determines, the configuration's JSON Schema, and the
chart of the figures that were measured.

`python -m tools.reference` writes them; `--check` writes nothing and exits with status 1 if one is stale.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tools.reference import (
    browser_client,
    command_line,
    configuration,
    error_codes,
    json_schema,
    performance_chart,
)

ROOT: Final = Path(__file__).parents[2]
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "docs/reference/configuration.md": configuration.page,
    "docs/reference/command-line.md": command_line.page,
    "docs/reference/exit-codes.md": command_line.exit_codes_page,
    "docs/reference/errors.md": error_codes.page,
    browser_client.PATH: browser_client.page,
    "pysync/config/pysync.schema.json": json_schema.text,
    "docs/assets/performance.svg": performance_chart.text,
}


def main() -> int:
    """Write the generated pages, or list the stale ones with `--check`, and return the exit status."""
    stale = [path for path, page in PAGES.items() if _current(path) != page()]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is stale: run `make reference`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        (ROOT / path).write_text(PAGES[path]())
        print(f"wrote {path}")
    return 0


def _current(path: str) -> str | None:
    return (ROOT / path).read_text() if (ROOT / path).exists() else None


if __name__ == "__main__":
    sys.exit(main())
