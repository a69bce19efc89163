"""`pysync copy`: what one store holds, in another."""

import argparse
import asyncio
import dataclasses
import sys
from contextlib import suppress
from typing import Final, TextIO

from pysync.cli.files import print_json
from pysync.config.schema import wire_name
from pysync.errors import StoreUnavailable
from pysync.migrate import Copier, Outcomes, open_source, open_target, place

_ON_TERMINAL_S: Final = 0.5
_ELSEWHERE_S: Final = 10.0
"""How often the progress is told."""
_DAMAGED: Final = ("corrupt: ", "unreadable: ")
_ERASE: Final = "\r\x1b[K"


def copy(options: argparse.Namespace) -> int:
    return asyncio.run(_copy(options))


async def _copy(options: argparse.Namespace) -> int:
    from_, to = place(options.source), place(options.target)
    if from_ == to:
        raise ValueError("FROM and TO are the same store")
    progress = Progress(sys.stderr)
    source = await open_source(from_)
    try:
        target = await open_target(to)
        try:
            copier = Copier(
                source,
                target,
                progress.tell,
                overwrite=options.overwrite,
                keep_corrupt=options.keep_corrupt,
                quick=options.quick,
            )
            await _run(copier, progress)
        finally:
            await target.close()
    finally:
        await source.close()
    return 0 if copier.outcomes.is_whole else 1


async def _run(copier: Copier, progress: "Progress") -> None:
    """Copy, and tell how far it came also where it ends early."""
    telling = asyncio.ensure_future(progress.follow(copier.outcomes))
    try:
        await copier.run()
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{error}; run it again to go on") from error
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling
        progress.end()
        progress.list_damaged()
        print_json({wire_name(name): count for name, count in dataclasses.asdict(copier.outcomes).items()})


class Progress:
    """What people are told meanwhile: on a terminal one line that changes, elsewhere one now and then."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._damaged: list[str] = []

    def tell(self, key: str, text: str) -> None:
        """A line of its own about one key."""
        self.end()
        line = f"pysync: {key}: {text}"
        print(line, file=self._out)
        if text.startswith(_DAMAGED):
            self._damaged.append(line)

    def list_damaged(self) -> None:
        """Print once more, together, what is damaged or could not be read."""
        if self._damaged:
            count = len(self._damaged)
            said = "1 object is" if count == 1 else f"{count} objects are"
            print(f"pysync: {said} damaged or unreadable:", *self._damaged, sep="\n", file=self._out)

    async def follow(self, outcomes: Outcomes) -> None:
        """Tell how far it is, for as long as this runs."""
        while True:
            await asyncio.sleep(_ON_TERMINAL_S if self._is_terminal else _ELSEWHERE_S)
            line = (
                f"{outcomes.copied} copied ({outcomes.bytes:,} bytes), {outcomes.already_there} already there"
            )
            start, end = (_ERASE, "") if self._is_terminal else ("", "\n")
            print(start + line, end=end, file=self._out, flush=True)

    def end(self) -> None:
        """Leave no unfinished line."""
        if self._is_terminal:
            print(_ERASE, end="", file=self._out, flush=True)
