"""docs/reference/plugins.md names every hook."""

import re
from pathlib import Path

from pysync.plugins.loader import HOOKS

PAGE = (Path(__file__).parents[2] / "docs/reference/plugins.md").read_text()


def test_every_hook_is_documented() -> None:
    for hook in HOOKS:
        assert re.search(rf"^\| `(async )?{hook}\b", PAGE, re.M)
        assert f"**`{hook}`**" in PAGE
