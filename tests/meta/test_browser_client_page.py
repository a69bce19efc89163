"""docs/reference/browser-client.md names all that the browser client exports, and the client stays small."""

import gzip
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/browser-client.md").read_text()
TYPES = (ROOT / "pysync/web/pysync.d.ts").read_text()


def words_of_code() -> set[str]:
    """The words in the code of the page, within lines and in blocks."""
    blocks = re.findall(r"^```js.*?^```|^ {4}.*?$", PAGE, re.M | re.S)
    within = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S))
    return set(re.findall(r"\w+", " ".join([*blocks, *within])))


def exports(text: str) -> set[str]:
    return set(re.findall(r"^export (?:async )?(?:class|function\*?|const) (\w+)", text, re.M))


def test_page_names_every_export() -> None:
    assert exports(TYPES)
    assert exports(TYPES) <= words_of_code()


def test_page_names_every_member_of_every_class() -> None:
    classes = re.findall(r"^export class (\w+)[^\n]*\{\n(.*?)^\}", TYPES, re.M | re.S)
    assert classes
    for name, body in classes:
        members = set(re.findall(r"^  (?:static |readonly )*(\w+)\??[(:<]", body, re.M)) - {"constructor"}
        assert members <= words_of_code(), name


def test_module_has_at_most_30_000_bytes_with_gzip() -> None:
    assert len(gzip.compress((ROOT / "pysync/web/pysync.js").read_bytes(), 9)) <= 30_000
