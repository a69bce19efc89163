"""Hooks of the static site: its navigation and front page, and links to files that the site does not have."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FRONT_PAGE_END = "<!-- The front page of the site ends here. -->"
DECISION_BOOST = 0.2
"""Weight of a decision in the search; that of other pages is 1."""
_LINE = re.compile(
    r"^## (?P<section>.+)|^\*\*(?P<group>.+)\*\*$|\[(?P<title>[^\]]+)\]\((?P<page>[^)#:]+\.md)\)", re.M
)
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation of the groups of docs/index.md, so that one page says what there is."""
    nav: list[Any] = [{"pysync": "index.md"}]
    pages = nav
    for line in _LINE.finditer((ROOT / "docs/index.md").read_text()):
        if line["section"]:
            pages = section = []
            overview = f"{line['section'].split()[0].lower()}/index.md"
            if (ROOT / "docs" / overview).exists():
                section.append(overview)
            nav.append({line["section"]: section})
        elif line["group"]:
            pages = []
            section.append({line["group"]: pages})
        elif pages is not nav:
            title = line["title"][0].upper() + line["title"][1:]
            pages.append({title: line["page"]})
    config.nav = nav
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Begin the front page with the first half of the README, have the search find decisions last, and name
    files of the repository that lie outside of `docs/` instead of linking to them."""
    if page.file.src_uri == "index.md":
        half = (ROOT / "README.md").read_text().partition(FRONT_PAGE_END)[0]
        half = re.sub(r"\]\((?![a-z]+:|#)", "](../", half).replace("](../docs/", "](")
        markdown = half + markdown[markdown.index("## ") :]
    if page.file.src_uri.startswith("explanation/decisions/"):
        page.meta["search"] = {"boost": DECISION_BOOST}
    depth = page.file.src_uri.count("/")

    def plain(link: re.Match[str]) -> str:
        text, up, path = link.groups()
        if up.count("../") <= depth:
            return link[0]
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(plain, markdown)
