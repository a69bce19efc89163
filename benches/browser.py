"""The browser client in Chromium: its size, its first sync, its local reads, its signed requests.

    python -m benches.browser [--quick] [--documents N] [--rounds N]

A replica of a new browser receives all documents of a collection, 1 KB each. Then the page is loaded again,
and the replica is opened and read: all documents at once, or one. Last, a page pulls one document again and
again with signed requests, one after another and 16 at once. The browser stores on the disk. The server stays
on one core, the browser on the other. Prints Markdown.
"""

import argparse
import asyncio
import gzip
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from benches import servers
from benches.compare import LOAD_CORE, SERVER_CORE, machine, spread
from benches.returning import listed, write
from benches.servers import CHECKOUT, Running
from pysync.cli.load_generator import cpu_s

sys.path.append(str(CHECKOUT / "tests"))  # where the real browser is that tests drive too
from components import Missing, chromium
from support.browser import driven

MODULE: Final = CHECKOUT / "pysync/web/pysync.js"
GOAL_BYTES: Final = 30_000
DOCUMENTS: Final = 100_000
PULLS: Final = 2_000
AT_ONCE: Final = 16
OPEN: Final = """
window.pysync = await import(base + "/client/pysync.js")
window.client = new pysync.Client(base)
window.began = performance.now()
window.replica = await pysync.Replica.open("bench", client, {listed: {}})
"""
SYNC: Final = f"""async (base) => {{
  {OPEN}
  await replica.synced()
  return performance.now() - began
}}"""
READ_ALL: Final = f"""async (base) => {{
  {OPEN}
  const {{length}} = await replica.entries("listed/")
  return [length, performance.now() - began]
}}"""
READ_ONE: Final = f"""async (base, key) => {{
  {OPEN}
  const found = await replica.get(key)
  return [Number(found !== null), performance.now() - began]
}}"""
PULL: Final = """async (base, pulls, atOnce) => {
  const pysync = await import(base + "/client/pysync.js")
  const client = new pysync.Client(base, {keys: await pysync.IdentityKeys.generate()})
  const key = `users/${client.identity}/1`
  await client.push(key, {text: "x".repeat(1000)}, null)
  let left = pulls
  const pull = async () => {
    while (left-- > 0) await client.pull(key)
  }
  const began = performance.now()
  await Promise.all(Array.from({length: atOnce}, pull))
  return performance.now() - began
}"""


class Round(NamedTuple):
    """What one new browser took."""

    sync_s: float
    server_us: float
    """CPU time of the server for a document of the first sync."""
    all_ms: float
    one_ms: float
    pulls: float
    pulls_at_once: float
    """Signed pulls a second."""


@contextmanager
def serving(folder: Path) -> Iterator[Running]:
    """A server that also serves a blank page, at `/examples/blank.html`."""
    with TemporaryDirectory() as place:
        Path(place, "blank.html").write_text("<!doctype html><title>Blank</title>")
        settings = {"server": {"maxQueueMs": 3_600_000, "examples": place}}
        with servers.serving(folder, SERVER_CORE, settings=settings) as server:
            yield server


async def measure(server: Running, documents: int, pulls: int) -> Round:
    """Measure with a new browser. Raises RuntimeError where it does not read all documents."""
    page = f"{server.url}/examples/blank.html"
    with servers.fresh_folder() as folder:
        folder.mkdir()
        with chromium(folder) as url:
            async with driven(url, is_private=False) as screen:
                window = await screen.open(page)
                before = cpu_s(server.pid)
                sync_ms = await window.run(SYNC, server.url)
                server_us = (cpu_s(server.pid) - before) * 1e6 / documents
                await window.load(page)
                count, all_ms = await window.run(READ_ALL, server.url)
                await window.load(page)
                found, one_ms = await window.run(READ_ONE, server.url, f"listed/{documents // 2:07}")
                if (count, found) != (documents, 1):
                    raise RuntimeError(f"{count} documents are read in place of {documents}")
                await window.load(page)
                rates = [
                    pulls * 1e3 / await window.run(PULL, server.url, pulls, each) for each in (1, AT_ONCE)
                ]
    return Round(sync_ms / 1e3, server_us, all_ms, one_ms, *rates)


def table(documents: int, rounds: list[Round]) -> str:
    """The Markdown table."""
    size = len(gzip.compress(MODULE.read_bytes(), 9))
    rate = documents / statistics.median(each.sync_s for each in rounds)

    def row(what: str, unit: str, form: str, values: Iterable[float]) -> str:
        return f"| {what} | {spread([*values], form)} {unit}|"

    return "\n".join(
        (
            "| what | figure |\n|---|---:|",
            f"| size of `pysync.js` with `gzip -9`; goal: at most {GOAL_BYTES:,} | {size:,} bytes |",
            row(f"first sync of {documents:,} documents", "s ", ".1f", (each.sync_s for each in rounds)),
            f"| the same, documents a second | {rate:,.0f} |",
            row("the same, CPU of the server a document", "µs ", ".0f", (each.server_us for each in rounds)),
            row(
                f"open after a reload, read all {documents:,}",
                "ms ",
                ",.0f",
                (each.all_ms for each in rounds),
            ),
            row("open after a reload, read one", "ms ", ".0f", (each.one_ms for each in rounds)),
            row("signed pulls a second, one after another", "", ",.0f", (each.pulls for each in rounds)),
            row(
                f"signed pulls a second, {AT_ONCE} at once",
                "",
                ",.0f",
                (each.pulls_at_once for each in rounds),
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few documents: to see that it works")
    options = parser.parse_args()
    documents, rounds, pulls = options.documents, options.rounds, PULLS
    if options.quick:
        documents, rounds, pulls = 300, 1, 50
    os.sched_setaffinity(0, {LOAD_CORE})
    with servers.fresh_folder() as folder, serving(folder) as server:
        asyncio.run(write(folder, listed(f"{n:07}" for n in range(documents)), 0))
        try:
            measured = [asyncio.run(measure(server, documents, pulls)) for _ in range(rounds)]
        except Missing as missing:
            print(f"{missing.component} is not installed: nothing is measured.")
            return
    print(f"{machine()}; {rounds} rounds.\n\n{table(documents, measured)}")


if __name__ == "__main__":
    main()
