"""The figures of the README and its chart, measured and recorded with one command.

    python -m benches.record [--rounds 5] [--quick] [--out FILE]

Runs `benches.compare` and `benches.workers`, which takes about twenty minutes with five rounds, and puts what
they print into `benches/RESULTS.md`, in place of what was recorded before, with the date. Then it draws the
chart anew. With `--quick` it runs both briefly, to see that they work, and needs `--out`, a file for what
they print.
"""

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benches.servers import CHECKOUT

RESULTS: Final = CHECKOUT / "benches/RESULTS.md"
BEGIN, END = "<!-- begin record -->\n", "<!-- end record -->\n"
SECTIONS: Final = {"Requests": "benches.compare", "Workers": "benches.workers"}


def measured(options: list[str]) -> str:
    """The sections, one for each bench. Raises CalledProcessError where one fails."""
    parts = []
    for title, bench in SECTIONS.items():
        run = [sys.executable, "-m", bench, *options]
        done = subprocess.run(run, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True)
        date = datetime.now(UTC).date()
        parts.append(f"## {title}, {date}\n\n`python -m {bench}`, on {done.stdout}")
    return "\n".join(parts)


def recorded(page: str, sections: str) -> str:
    """The page with these sections in place of those that were recorded. Raises ValueError where it has no
    place for them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{RESULTS} has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{sections}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.record", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--quick", action="store_true", help="two short rounds: to see that it works")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there, not into RESULTS.md")
    options = parser.parse_args()
    if options.quick and options.out is None:
        parser.error("figures of short rounds are not recorded: name a file with --out")
    sections = measured(["--quick"] if options.quick else ["--rounds", str(options.rounds)])
    if options.out is not None:
        options.out.write_text(sections)
        return
    RESULTS.write_text(recorded(RESULTS.read_text(), sections))
    subprocess.run([sys.executable, "-m", "tools.reference"], cwd=CHECKOUT, check=True)


if __name__ == "__main__":
    main()
