"""Recording figures: a page keeps everything else, and what was recorded before is replaced."""

import pytest

from benches import record


def test_what_was_recorded_is_replaced() -> None:
    page = f"# Results\n\n{record.BEGIN}old\n{record.END}\n## More\n"
    recorded = record.recorded(page, "## Requests\n")
    assert recorded == f"# Results\n\n{record.BEGIN}\n## Requests\n\n{record.END}\n## More\n"
    assert record.recorded(recorded, "## Requests\n") == recorded
    with pytest.raises(ValueError, match="has no lines"):
        record.recorded("# Results\n", "")


def test_results_have_a_place_for_what_is_recorded() -> None:
    page = record.RESULTS.read_text()
    assert "new" in record.recorded(page, "new")
