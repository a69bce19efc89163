"""Recording figures: a page keeps everything else, and what was recorded before is replaced."""

from pathlib import Path

import pytest

from benches import record


def test_what_was_recorded_is_replaced() -> None:
    page = f"# Results\n\n{record.BEGIN}old\n{record.END}\n## More\n"
    recorded = record.recorded(page, "## Requests\n")
    assert recorded == f"# Results\n\n{record.BEGIN}\n## Requests\n\n{record.END}\n## More\n"
    assert record.recorded(recorded, "## Requests\n") == recorded
    with pytest.raises(ValueError, match="has no lines"):
        record.recorded("# Results\n", "")


@pytest.mark.parametrize("path", [record.RESULTS, record.PAGE])
def test_every_file_has_a_place_for_what_is_recorded(path: Path) -> None:
    assert "new" in record.recorded(path.read_text(), "new")
