"""The documentation says what the code does."""

import json
import re
import shlex
from pathlib import Path

from support.projection_site import Site

from pysync.cli.commands import build_parser

ROOT = Path(__file__).parents[2]


def test_what_the_documentation_shows_of_watch_and_tail_is_understood() -> None:
    shown = re.findall(r"^    pysync ((?:watch|tail).*)", (ROOT / "docs/operations.md").read_text(), re.M)
    assert len(shown) == 3
    for line in shown:
        options = build_parser().parse_args(shlex.split(line, comments=True))
        assert options.run in (("documents", "watch"), ("documents", "tail"))


def test_what_the_documentation_shows_of_copy_check_and_verify_is_understood() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    shown = re.findall(r"^    pysync ((?:copy|check|verify) .*)", page, re.M)
    assert len(shown) == 5
    for line in shown:
        options = build_parser().parse_args(line.replace("[", "").replace("]", "").split())
        assert options.run in (("admin", "copy"), ("serve", "check"), ("admin", "verify"))


async def test_the_projection_that_the_documentation_shows_keeps_the_list_that_it_shows() -> None:
    page = (ROOT / "docs/operations.md").read_text().split("## Projections")[1].split("\n## ")[0]
    shown = json.loads(page.split("```json")[1].split("```")[0])
    site = Site({**shown, "store": "memory:"})
    await site.push("notes", {"spaceId": "s1", "noteId": "n1"}, {"title": "Spring"})
    await site.fold()
    assert await site.items("lists/s1") == [{"id": "n1", "value": {"title": "Spring"}}]
    (line,) = re.findall(r"^    pysync (project .*)", page, re.M)
    options = build_parser().parse_args(line.split())
    assert options.name in [one.name for one in site.projections]
