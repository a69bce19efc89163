"""A program of Python that notes what its main thread is at, every few milliseconds of CPU time.

    python -m benches.sampler FILE MODULE ARGUMENT...

Runs MODULE as `python -m` does. The first SIGUSR1 begins to sample, the next one ends it and writes FILE, and
so on. Time that is spent in C counts for the Python function that called it, or that it calls next: the
interpreter handles the signal of its timer between two instructions.
"""

import json
import runpy
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import aiohttp

import pysync

INTERVAL_S: Final = 0.001
"""CPU seconds between two samples. The kernel's clock may tick less often, and then it is a tick."""
PACKAGES: Final = tuple(Path(str(package.__file__)).parent for package in (pysync, aiohttp))
"""A sample counts for the innermost function of these."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The CPU seconds of the main thread, and of all threads; and how many samples fell on each function, as
    `package/module function`."""

    main_s: float
    all_s: float
    functions: dict[str, int]


class Sampler:
    """Counts the functions that the main thread is at, while it is on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began: tuple[float, float] | None = None
        self._stacks: Counter[tuple[CodeType, ...]] = Counter()

    def install(self) -> None:
        """Handle the signals."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.signal(signal.SIGUSR1, self._toggle)
        signal.siginterrupt(signal.SIGUSR1, False)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        self._stacks[tuple(codes)] += 1

    def _toggle(self, number: int, frame: FrameType | None) -> None:
        if self._began is None:
            self._stacks.clear()
            self._began = _spent()
            signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
            return
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        main_s, all_s = (now - began for now, began in zip(_spent(), self._began, strict=True))
        self._began = None
        functions: Counter[str] = Counter()
        for codes, count in self._stacks.items():
            functions[next(filter(None, map(function_of, codes)), "")] += count
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(asdict(Samples(main_s, all_s, dict(functions)))))
        written.replace(self._path)


def function_of(code: CodeType) -> str | None:
    """The name of a function of PACKAGES, None for any other."""
    path = Path(code.co_filename).with_suffix("")
    package = next(filter(path.is_relative_to, PACKAGES), None)
    return None if package is None else f"{path.relative_to(package.parent)} {code.co_qualname}"


def _spent() -> tuple[float, float]:
    """CPU seconds of the main thread, which calls this, and of all threads, until now."""
    return time.thread_time(), time.process_time()


def main() -> None:
    path, module = Path(sys.argv[1]), sys.argv[2]
    Sampler(path).install()
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
