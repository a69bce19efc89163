"""The figures of benches/RESULTS.md and docs/explanation/performance.md, measured and recorded at once.

    python -m benches.record [--rounds 5] [--quick] [--out FILE]

Puts what `benches.compare` and `benches.workers` print into RESULTS.md, what `benches.request_profile` prints
into the page, both in place of what was recorded before, and draws the chart of the README anew. Takes about
25 minutes with five rounds. With `--quick` it runs all three briefly, to see that they work, and needs
`--out`, a file for what they print.
"""

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benches.servers import CHECKOUT

RESULTS: Final = CHECKOUT / "benches/RESULTS.md"
PAGE: Final = CHECKOUT / "docs/explanation/performance.md"
BEGIN, END = "<!-- begin record -->\n", "<!-- end record -->\n"


def measured(quick: bool, rounds: int) -> dict[Path, str]:
    """What each file has to say. Raises CalledProcessError where a bench fails."""
    options = ["--quick"] if quick else ["--rounds", str(rounds)]
    requests, workers = _printed("benches.compare", *options), _printed("benches.workers", *options)
    profile = _printed("benches.request_profile", *(["--quick"] if quick else []))
    today = datetime.now(UTC).date()
    return {
        RESULTS: f"## Requests, {today}\n\n{requests}\n## Workers, {today}\n\n{workers}",
        PAGE: f"Measured on {today}. {profile}",
    }


def _printed(bench: str, *options: str) -> str:
    command = [sys.executable, "-m", bench, *options]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, check=True)
    return f"`python -m {bench}`, on {done.stdout}"


def recorded(page: str, text: str) -> str:
    """The page with `text` in place of what was recorded. Raises ValueError where it has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.record", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default: 5)")
    parser.add_argument("--quick", action="store_true", help="two short rounds: to see that it works")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there, not into the pages")
    options = parser.parse_args()
    if options.quick and options.out is None:
        parser.error("figures of short rounds are not recorded: name a file with --out")
    texts = measured(options.quick, options.rounds)
    if options.out is not None:
        options.out.write_text("\n".join(texts.values()))
        return
    for path, text in texts.items():
        path.write_text(recorded(path.read_text(), text))
    subprocess.run([sys.executable, "-m", "tools.reference"], cwd=CHECKOUT, check=True)


if __name__ == "__main__":
    main()
