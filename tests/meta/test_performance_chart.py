"""The chart of performance shows what RESULTS.md has; `test_generated_pages_are_current` holds it to that."""

import xml.etree.ElementTree as ET

import pytest

from tools.reference import performance_chart
from tools.reference.performance_chart import Figures, Row

RESULTS = """
where bare aiohttp gave
10,000 to 12,000 (GET)

| request | row | Python server | TypeScript server |
|---|---|---:|---:|
| public pull | pull | 1,414 | 2,838 |
| list of 1,000 | list-first | 12 | 29.6 |

| workload | per s | goal |
|---|---:|---:|
| bare-get | 20,000 |  |
| pull | 15,000 | 0.7 |
| list-first | 2,100 | 0.7 |

| workload | per s |
|---|---:|
| bare-get | 1 |
| pull | 1 |
"""
SVG = "{http://www.w3.org/2000/svg}"


def test_figures_are_those_of_the_first_table_and_of_existing_servers() -> None:
    found = performance_chart.figures(RESULTS)
    assert found == Figures(
        [Row("public pull", (15_000, 1_414, 2_838)), Row("list of 1,000", (2_100, 12, 29.6))],
        "20,000",
        "10,000 to 12,000",
    )
    assert [round(row.times) for row in found.rows] == [5, 71]


@pytest.mark.parametrize("missing", ["| workload | per s | goal", "| request | row", "bare aiohttp gave"])
def test_results_without_figures_have_no_chart(missing: str) -> None:
    changed = RESULTS.replace(missing, "").replace("| workload | per s |", "")
    with pytest.raises(ValueError, match=r"RESULTS\.md lacks"):
        performance_chart.figures(changed)


def test_chart_is_a_picture_that_says_what_it_shows() -> None:
    picture = ET.fromstring(performance_chart.chart(performance_chart.figures(RESULTS)))
    title, described = picture.find(f"{SVG}title"), picture.find(f"{SVG}desc")
    assert title is not None
    assert described is not None
    assert described.text is not None
    assert picture.get("aria-labelledby") == f"{title.get('id')} {described.get('id')}"
    for figure in ("15,000", "1,414", "2,838", "2,100", "12", "29.6"):
        assert figure in described.text
    shown = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"15,000", "29.6", "5", "71", "10", "100,000"} <= set(shown)
    width = float(picture.get("width", 0))
    assert all(0 < float(text.get("x", 0)) < width for text in picture.iter(f"{SVG}text"))


def test_a_rate_ten_times_as_high_lies_one_decade_to_the_right() -> None:
    rows = [Row("a", (100.0, 10.0, 1_000.0))]
    picture = ET.fromstring(performance_chart.chart(Figures(rows, "1", "1 to 2")))
    labels = {text.text: float(text.get("x", 0)) for text in picture.iter(f"{SVG}text")}
    circles = [float(circle.get("cx", 0)) for circle in picture.iter(f"{SVG}circle")]
    assert circles[-1] == pytest.approx((performance_chart.LEFT + performance_chart.RIGHT) / 2)
    assert labels["100"] > labels["10"]
