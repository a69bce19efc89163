"""The reference says what the code does: its pages are current, and what they and the code cite exists."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from support.clients import Browser, Start

from pysync import client, errors
from pysync.client import sealed
from pysync.server.process.exposition import Metrics
from pysync.server.process.metrics import Counters

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def headings(page: Path) -> list[str]:
    """The anchors of a page, as renderers of Markdown make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return [re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles]


def test_generated_pages_are_current() -> None:
    command = [sys.executable, "-m", "tools.reference", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.stem)
def test_anchors_are_unique_on_each_page(page: Path) -> None:
    anchors = headings(page)
    assert len(anchors) == len(set(anchors))


def test_every_cited_anchor_exists() -> None:
    files = [
        file
        for pattern in (
            "pysync/**/*.py*",
            "rust/*.rs",
            "tests/**/*.py",
            "tests/*.rs",
            "benches/*.py",
            "tools/**/*.py",
        )
        for file in ROOT.glob(pattern)
        if file.suffix in (".py", ".pyi", ".rs")
    ]
    cited = {
        (file, *found)
        for file in files
        for found in re.findall(r"(docs/[\w/-]+\.md)(?:#([\w-]+))?", file.read_text())
    }
    assert len(cited) > 80
    for file, page, anchor in cited:
        assert (ROOT / page).exists(), f"{file}: {page}"
        assert not anchor or anchor in headings(ROOT / page), f"{file}: {page}#{anchor}"


def test_error_codes_that_the_protocol_names_have_that_status() -> None:
    page = (REFERENCE / "protocol.md").read_text()
    named = re.findall(r"`(\d{3})\s+([a-z]+(?:_[a-z]+)+)`", page)
    assert len(named) > 40
    for status, code in named:
        assert errors.errors_by_code()[code].status == int(status), code


async def test_the_protocol_names_every_route(start: Start, session: aiohttp.ClientSession) -> None:
    overview = (REFERENCE / "protocol.md").read_text().split("## Conventions")[0]
    example = json.loads((ROOT / "deploy/example.json").read_text())
    example["server"]["examples"] = str(ROOT / "deploy/examples")
    example["store"] = "memory:"
    described = await Browser(await start(example), session).request("GET", "/openapi.json")
    prefixes = {"", "v1", *example["namespaces"]}
    routes = {
        next((part for part in path.split("/") if part not in prefixes), "`")
        for path in described.json["paths"]
    }
    assert len(routes) > 8
    for route in routes - {"sync"}:  # of a published client
        assert f"/{route}" in overview, route


def test_every_metric_is_documented_with_its_labels() -> None:
    rows = re.findall(
        r"^\| \[`(pysync_\w+)`\]\(#.*?\) \| (\w+) \| (.*?) ?\|", (REFERENCE / "metrics.md").read_text(), re.M
    )
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    exposed = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, tuple(family._labelnames))  # type: ignore[attr-defined]
        for family in Metrics(Counters).collect()
    }
    assert documented == exposed


def test_every_public_name_of_the_client_is_documented() -> None:
    page = (REFERENCE / "client.md").read_text()
    methods = {
        name
        for kind in (client.Client, client.SyncDocument, client.LogCursor)
        for name, _ in inspect.getmembers(kind)
        if not name.startswith("_")
    }
    for name in methods | set(client.__all__) | set(sealed.__all__):
        assert re.search(rf"\b{name}\b", page), name
