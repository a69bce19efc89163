"""`docs/assets/performance.svg`: requests a second of pysync and of the existing servers, on a log axis.

All figures are those of `benches/RESULTS.md`: the first table there of workloads, and that of the existing
servers.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

RESULTS: Final = Path(__file__).parents[2] / "benches/RESULTS.md"
SERVERS: Final = ("pysync", "Starfish, Python", "Starfish, TypeScript")
COLOURS: Final = ("#0b5cad", "#b35900", "#6a3d9a")

WIDTH, LEFT, RIGHT, TOP, ROW_HEIGHT = 760, 200, 670, 76, 30
DOT = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of request, and how many of it each of SERVERS answers in a second."""

    name: str
    per_second: tuple[float, ...]

    @property
    def times(self) -> float:
        """The rate of pysync beside that of the faster existing server."""
        return self.per_second[0] / max(self.per_second[1:])


@dataclass(frozen=True, slots=True)
class Figures:
    """What the chart shows. `bare` and `existing_bare` are what a bare aiohttp server answered to GET in the
    run of pysync, and on the machine of the existing servers."""

    rows: Sequence[Row]
    bare: str
    existing_bare: str


def text() -> str:
    """The chart of the figures that are recorded, with a final line break."""
    return chart(figures(RESULTS.read_text()))


def figures(results: str) -> Figures:
    """Read the figures from the text of RESULTS.md. Raises ValueError if they are not there."""
    tables = list(_tables(results))
    measured = next((rows for rows in tables if rows[0][:2] == ["workload", "per s"]), None)
    existing = next((rows for rows in tables if rows[0][:2] == ["request", "row"]), None)
    bare = re.search(r"bare\s+aiohttp\s+gave\s+([\d,]+ to [\d,]+)", results)
    if measured is None or existing is None or bare is None:
        raise ValueError("benches/RESULTS.md lacks a table of workloads, or the figures of existing servers")
    rates = {row[0]: _number(row[1]) for row in measured[2:]}
    rows = [Row(name, (rates[row], *map(_number, others))) for name, row, *others in existing[2:]]
    return Figures(rows, f"{rates['bare-get']:,.0f}", bare[1])


def chart(found: Figures) -> str:
    """The SVG of the figures."""
    rates = [rate for row in found.rows for rate in row.per_second]
    decades = range(math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates))) + 1)

    def x(rate: float) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log10(rate) - decades[0]) / (decades[-1] - decades[0])

    bottom = TOP + ROW_HEIGHT * len(found.rows)
    height = bottom + 36 + 18 * len(NOTES)
    facts = [f"{row.name}: {', '.join(map(_shown, row.per_second))}" for row in found.rows]
    described = f"{', '.join(SERVERS)}. {'; '.join(facts)}."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title desc" font-size="13" fill="#1f2328" '
        "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        '<title id="title">Requests a second of pysync and of the existing servers</title>',
        f'<desc id="desc">{escape(described)}</desc>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="#ffffff" '
        'stroke="#d0d7de"/>',
        _text(16, 26, "Requests a second, on a logarithmic axis", weight="600"),
        *_legend(),
        _text(WIDTH - 16, TOP - 12, "times", anchor="end", colour="#59636e", size=12),
    ]
    for power in decades:
        at = x(10**power)
        parts.append(f'<path d="M{at:.1f} {TOP - 6}V{bottom}" stroke="#e4e8ec"/>')
        parts.append(_text(at, bottom + 16, f"{10**power:,}", anchor="middle", colour="#59636e", size=12))
    for number, row in enumerate(found.rows):
        parts += _row(row, TOP + ROW_HEIGHT * number + ROW_HEIGHT / 2, [x(rate) for rate in row.per_second])
    for number, note in enumerate(NOTES):
        y = bottom + 42 + 18 * number
        parts.append(_text(16, y, note.format(found=found), colour="#59636e", size=12))
    return "\n".join([*parts, "</svg>"]) + "\n"


NOTES: Final = (
    "pysync: one process on one core, where bare aiohttp gave {found.bare} (GET). "
    "Times: the faster existing server.",
    "Existing servers: same kind of machine, not the same run; bare aiohttp gave "
    "{found.existing_bare} (GET).",
    "The list is of 10,000 documents (pysync: 100,000), and the log has 4,900 elements (pysync: it grows).",
)


def _legend() -> Iterator[str]:
    at = LEFT
    for number, name in enumerate(SERVERS):
        yield _mark(number, at, 46)
        yield _text(at + 12, 50, name)
        at += 100 if number == 0 else 150


def _row(row: Row, y: float, at: Sequence[float]) -> Iterator[str]:
    """The dots of a row, with their rates: that of the slowest on its left, the others' on their right."""
    slowest = min(range(len(at)), key=at.__getitem__)
    yield _text(16, y + 4, row.name)
    yield f'<path d="M{min(at):.1f} {y}H{max(at):.1f}" stroke="#afb8c1"/>'
    for number, rate in enumerate(row.per_second):
        yield _mark(number, at[number], y)
        side, anchor = (-9, "end") if number == slowest else (9, "start")
        weight = "600" if number == 0 else "400"
        yield _text(at[number] + side, y + 4, _shown(rate), anchor, COLOURS[number], 12, weight)
    yield _text(WIDTH - 16, y + 4, f"{row.times:,.0f}", anchor="end", weight="600")


def _mark(number: int, x: float, y: float) -> str:
    """The dot of a server: each has a shape of its own."""
    shape = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"',
        f'<rect x="{x - DOT + 0.5:.1f}" y="{y - DOT + 0.5:.1f}" width="{2 * DOT - 1}" height="{2 * DOT - 1}"',
        f'<path d="M{x:.1f} {y - DOT:.1f}l{DOT + 0.5} {2 * DOT - 0.5}h{-2 * DOT - 1}z"',
    )
    return f'{shape[number]} fill="{COLOURS[number]}" stroke="#ffffff" stroke-width="0.5"/>'


def _text(
    x: float,
    y: float,
    content: str,
    anchor: str = "start",
    colour: str = "",
    size: int = 13,
    weight: str = "400",
) -> str:
    """A text with white around it, which keeps it legible on a line."""
    fill = f' fill="{colour}"' if colour else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
        f'{fill} stroke="#ffffff" stroke-width="4" paint-order="stroke">{escape(content)}</text>'
    )


def _tables(markdown: str) -> Iterator[list[list[str]]]:
    """The tables of a page as rows of cells; the second row is the line below the header."""
    for block in re.findall(r"(?:^\|.*\|\n)+", markdown, re.M):
        yield [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def _shown(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 or rate.is_integer() else f"{rate:.1f}"
