"""Links in the documentation lead somewhere, and the static site loads nothing from elsewhere."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.browser import driven

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "deploy/README.md"])

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.M)
_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.M | re.S)
_LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=[\"']?([^\"' >]+)")


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    counts: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor of each link to a file of this repository."""
    for link in _LINK.findall(_CODE.sub("", prose(page))):
        path, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", path):
            yield (page.parent / path if path else page), anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{target} does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{target} has no heading #{anchor}"


def test_every_decision_is_dated_and_in_the_index() -> None:
    folder = ROOT / "docs/explanation/decisions"
    records = sorted(path.name for path in folder.glob("0*.md"))
    assert len({name[:4] for name in records}) == len(records)
    assert [target.name for target, _ in links(folder / "index.md") if target.name[0] == "0"] == records
    for name in records:
        text = (folder / name).read_text()
        assert re.match(
            rf"# {name[:4]}: .+\n\nDate: \d{{4}}-\d\d-\d\d\. Status: (accepted|superseded)\b", text
        ), name
        headings = re.findall(r"^## (.+)$", text, re.M)
        assert headings == ["Context", "Decision", "Alternatives", "Consequences"], name


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: strictly."""
    pytest.importorskip("mkdocs")
    built = tmp_path_factory.mktemp("site")
    run = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(ROOT.glob("docs/**/*.md")))  # the page for what is not found, too
    for page in pages:
        loaded = _LOADED.findall(page.read_text())
        assert loaded, page
        for url in loaded:
            assert not re.match(r"(?:[a-z]+:)?//", url) or url.startswith("data:"), f"{page}: {url}"


@pytest.mark.slow
async def test_site_opened_as_files_draws_diagrams_and_searches(site: Path, chromium: str) -> None:
    page = ROOT / "docs/explanation/architecture.md"
    async with driven(chromium) as browser:
        window = await browser.open((site / "explanation/architecture.html").as_uri())
        for other in PAGES:
            for source in _DIAGRAM.findall(other.read_text()):
                error = await window.run(f"mermaid.parse({json.dumps(source)}).then(() => '', String)")
                assert error == "", other
        # The theme puts each drawing into a closed shadow tree, in place of its source.
        count = len(_DIAGRAM.findall(page.read_text()))
        await window.until(f"document.querySelectorAll('div.mermaid').length === {count}")
        await window.until(
            "[...document.querySelectorAll('div.mermaid')].every((one) => one.offsetHeight > 50)"
        )
        await window.run("document.querySelector('[data-md-component=search-query]').focus()")
        await window.type("linearizable")
        await window.until("document.querySelector('.md-search-result__list a') !== null")
        assert browser.complaints == []


class Text(HTMLParser):
    """The text of a page, outside and inside of its `<nav>`."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.depth = 0
        self.links: list[str] = []
        self.tabs: list[str] = []
        self.prose = ""
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.depth += tag == "nav"
        if tag == "a" and self.depth:
            self.links.append(dict(attrs).get("href") or "")
            self.tabs += [self.links[-1]] if dict(attrs).get("class") == "md-tabs__link" else []

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "nav"

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.prose += data


@pytest.mark.slow
def test_front_page_of_the_site_says_what_the_readme_says_first(site: Path) -> None:
    first = (ROOT / "README.md").read_text().split("\n\n")[1]
    text = " ".join(Text(site / "index.html").prose.split())
    assert " ".join(first.split()) in text


@pytest.mark.slow
def test_navigation_of_the_site_leads_to_every_page_but_single_decisions(site: Path) -> None:
    shown = set(Text(site / "index.html").links)
    pages = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")
    }
    decisions = {page for page in pages if re.match(r"explanation/decisions/\d", page)}
    assert decisions
    assert shown >= pages - decisions
    assert not shown & decisions
    assert len(Text(site / "index.html").tabs) == 5


@pytest.mark.slow
def test_search_of_the_site_finds_decisions_last(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    for entry in index:
        assert ("decisions/" in entry["location"]) == (entry.get("boost", 1) < 1), entry["location"]


@pytest.mark.slow
async def test_theme_of_the_site_is_switched_by_a_button(site: Path, chromium: str) -> None:
    async with driven(chromium) as browser:
        window = await browser.open((site / "index.html").as_uri())
        scheme = "document.body.getAttribute('data-md-color-scheme')"
        await window.until(f"{scheme} === 'default'")
        for _ in range(2):
            labels = "[...document.querySelectorAll('[data-md-component=palette] label')]"
            shown = f"{labels}.find((one) => one.offsetParent)"
            await window.until(f"{shown} !== undefined")
            await window.run(f"{shown}.click()")
        await window.until(f"{scheme} === 'slate'")


def test_modules_that_the_explanations_name_exist() -> None:
    for page in (ROOT / "docs/explanation").rglob("*.md"):
        for name in re.findall(r"`([\w/]+\.(?:py|rs))`", page.read_text()):
            assert (ROOT / "pysync" / name).exists() or (ROOT / name).exists(), f"{page}: {name}"


def test_lock_order_names_every_module_that_creates_a_lock() -> None:
    creates = re.compile(r"\b(?:asyncio|threading)\.(?:Lock|Condition|Semaphore)\(|\bflock\(")
    package = ROOT / "pysync"
    locking = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if creates.search(path.read_text()) and "testing" not in path.parts
    }
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/explanation/lock-order.md").read_text()))
    assert locking <= named
