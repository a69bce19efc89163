"""Every command and snippet of the tutorials and how-to pages works, in the order of the page."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from components import RedisServer, S3Server
from support.page_runner import PageRunner, blocks_of

from pysync.auth.identity_keys import IdentityKeys

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BROWSER = "tutorial/browser.md"
MIGRATION = "how-to/migrate-from-starfish.md"
SEVERAL_MACHINES = "how-to/run-on-several-machines.md"
PAGES = {
    str(path.relative_to(DOCS)) for folder in ("tutorial", "how-to") for path in (DOCS / folder).glob("*.md")
}


@pytest.mark.parametrize("page", sorted(PAGES - {BROWSER, MIGRATION, SEVERAL_MACHINES}))
def test_page_shows_what_works(page: str, tmp_path: Path) -> None:
    with PageRunner(tmp_path / "page") as runner:
        runner.page((DOCS / page).read_text())


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    blocks = [
        block for page in PAGES for block in blocks_of((DOCS / page).read_text()) if block.language == "sh"
    ]
    reasons = [block.value("not run") for block in blocks if block.value("not run")]
    assert len(reasons) < len(blocks) / 5
    assert all(len(reason.split()) > 2 for reason in reasons)


def test_index_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text()))
    assert linked >= PAGES


def test_no_page_installs_pysync_from_an_index_that_lacks_it() -> None:
    pages = [*DOCS.rglob("*.md"), *(ROOT / "deploy").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for page in pages:
        assert not re.search(r"pip install ['\"]?pysync\b", page.read_text()), page


def test_quotations_have_no_stray_marks() -> None:
    for page in DOCS.rglob("*.md"):
        assert not re.search(r"[.,:] > ", page.read_text()), page


def test_page_on_the_javascript_client_warns_of_its_default_on_conflicts() -> None:
    assert "`onConflict`" in (DOCS / MIGRATION).read_text()


def test_metrics_of_the_pages_exist() -> None:
    known = set(re.findall(r"pysync_\w+", (DOCS / "reference/metrics.md").read_text()))
    for page in PAGES:
        assert known.issuperset(re.findall(r"\bpysync_[a-z_]+", (DOCS / page).read_text())), page


def test_readme_shows_what_works(tmp_path: Path) -> None:
    with PageRunner(tmp_path / "page") as runner:
        (runner.folder / "deploy").symlink_to(ROOT / "deploy")
        (runner.folder / ".venv").symlink_to(sys.prefix)
        shutil.copy(ROOT / "README.md", runner.folder)
        runner.run("pysync serve --config deploy/example.json")
        runner.page((ROOT / "README.md").read_text())


def test_nodes_share_a_bucket_and_a_redis_as_the_page_says(
    radosgw: S3Server, redis: RedisServer, tmp_path: Path
) -> None:
    environment = {
        "STORE_URL": f"s3://{radosgw.bucket}/several-machines",
        "S3_ENDPOINT": radosgw.endpoint,
        "REDIS_URL": redis.url,
        "AWS_ACCESS_KEY_ID": radosgw.access_key_id,
        "AWS_SECRET_ACCESS_KEY": radosgw.secret_access_key,
    }
    with PageRunner(tmp_path / "page", **environment) as runner:
        runner.page((DOCS / SEVERAL_MACHINES).read_text())


def test_published_clients_of_starfish_work_with_their_data_on_pysync(
    starfish_python: Path, starfish_npm: Path, tmp_path: Path
) -> None:
    page = (DOCS / MIGRATION).read_text()
    for command in re.findall(r"^(?:starfish/bin/pip|npm) install (.*)", page, re.M):
        assert command in (ROOT / "tests/components/install").read_text(), (
            "the page names the versions tested"
        )
    with PageRunner(tmp_path / "page") as runner:
        (runner.folder / "starfish").symlink_to(starfish_python)
        (runner.folder / "node_modules").symlink_to(starfish_npm)
        me = IdentityKeys.from_passphrase("correct horse battery staple").user_id
        old = runner.folder / f"starfish-data/users/{me}/settings"
        old.parent.mkdir(parents=True)
        data = {"language": "en"}
        digest = hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()
        old.write_text(json.dumps({"v": 1, "data": data, "ts": 1_700_000_000_000, "hash": digest}))
        runner.page(page)
