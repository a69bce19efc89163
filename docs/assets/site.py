"""Hooks of the static site: the order of its sections, and links to files that the site does not have."""

import re
from typing import Any

from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

SECTIONS = ["Tutorial", "How to", "Reference", "Explanation"]
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)\s]+)\)")


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Put the sections into the order in which a newcomer reads them, behind the start page."""
    nav.items.sort(key=lambda item: SECTIONS.index(item.title) + 1 if item.title in SECTIONS else 0)
    return nav


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Name files of the repository that lie outside of `docs/` instead of linking to them."""
    depth = page.file.src_uri.count("/")

    def plain(link: re.Match[str]) -> str:
        text, up, path = link.groups()
        if up.count("../") <= depth:
            return link[0]
        return text if path in text else f"{text} (`{path}`)"

    return _LINK.sub(plain, markdown)
