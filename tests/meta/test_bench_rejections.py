"""The bench of refused requests: every kind is refused as it says, or there is no figure."""

from pathlib import Path

import pytest

from benches import rejections

pytestmark = pytest.mark.process


def test_every_kind_of_refusal_is_measured(tmp_path: Path) -> None:
    with rejections.serving(tmp_path / "data") as server:
        kinds = rejections.kinds(server)
        found = rejections.measure(server, kinds, rounds=2, requests=2)
        assert list(found) == [kind.name for kind in kinds]
        # Linux may account for so little later than it is asked.
        assert all(len(figures) == 2 and min(figures) >= 0 for figures in found.values())
        assert sum(map(sum, found.values())) > 0
        wrong = rejections.Kind("wrong", 200, kinds[0].make)
        with pytest.raises(RuntimeError, match="answered 404, not 200"):
            rejections.measure(server, [wrong], rounds=1, requests=1)
    assert rejections.table({"a": [3.0, 1.0, 2.0]}).endswith("| a | 2 (1 to 3) |")
