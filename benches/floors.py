"""The least time that a request takes on this machine: what a bare one takes, and the work that nobody can
leave out.

That work is to verify each signature, to hash what is written, to check what is read, to copy what is long,
and to have what is acknowledged on disk. Its prices are measured here, on the server's core, in the same run
as the requests. A signature counts as one of a batch, and a flush is shared by as many writes as there are
connections. Nothing is counted for finding a document, for parsing JSON, or for deciding who may read it.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from benches import servers
from benches.core import SIGNED, large_body, microseconds, push_and_store, signed_request
from benches.workloads import BIG_BYTES
from pysync import _core
from pysync.cli.load_generator import CONNECTIONS

KIB: Final = 1_024
FLUSHES: Final = 15


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a request beside that of a bare one: the number of signatures, and the bytes that are
    hashed, checked, copied, and flushed before the answer."""

    signatures: int = 0
    hashed: int = 0
    checked: int = 0
    copied: int = 0
    flushed: int = 0


NO_WORK: Final = Work()


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of work in microseconds: of a signature alone, and as one of SIGNED; of each KiB; and of
    flushing each size as one of CONNECTIONS writes."""

    alone_us: float
    signature_us: float
    hashed_us: float
    checked_us: float
    copied_us: float
    flushed_us: dict[int, float]

    def cost_us(self, work: Work) -> float:
        """Return the least time that `work` takes."""
        by_kib = (
            self.hashed_us * work.hashed + self.checked_us * work.checked + self.copied_us * work.copied
        ) / KIB
        flush = self.flushed_us[work.flushed] if work.flushed else 0.0
        return self.signature_us * work.signatures + by_kib + flush


def measure(flushed: Iterable[int], core: int) -> Prices:
    """Measure the prices on `core`, those of flushes for each of these sizes, in the folder in which stores
    are."""
    with servers.pinned(core):
        signed = [signed_request(number, b"") for number in range(SIGNED)]
        stored = push_and_store(large_body())
        big, room = memoryview(bytes(BIG_BYTES)), memoryview(bytearray(BIG_BYTES))

        def copy() -> None:
            room[:] = big

        return Prices(
            alone_us=_median_us(lambda: _core.verify_request(*signed[0])),
            signature_us=_median_us(lambda: _core.verify_requests(signed)) / SIGNED,
            hashed_us=_median_us(lambda: sha256(big).digest()) * KIB / BIG_BYTES,
            checked_us=_median_us(lambda: _core.read_document(stored)) * KIB / len(stored),
            copied_us=_median_us(copy) * KIB / BIG_BYTES,
            flushed_us={size: _flushed_us(size) for size in sorted(set(flushed))},
        )


def table(prices: Prices) -> str:
    """The Markdown table of prices."""
    rows = [
        (f"verify a signature, one of {SIGNED}", prices.signature_us),
        ("verify a signature alone, not in the floor", prices.alone_us),
        ("hash 1 KiB (SHA-256)", prices.hashed_us),
        ("check 1 KiB that was stored", prices.checked_us),
        ("copy 1 KiB", prices.copied_us),
        *(
            (f"write {CONNECTIONS} times {size:,} bytes and flush once, a share of that", flushed_us)
            for size, flushed_us in prices.flushed_us.items()
        ),
    ]
    lines = ["| what a request cannot leave out | µs |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {name} | {price:.2f} |" for name, price in rows)])


def _median_us(call: Callable[[], object]) -> float:
    return statistics.median(microseconds(call))


def _flushed_us(size: int) -> float:
    """The time of one of CONNECTIONS writes that share a flush, into blocks that the file has already."""
    body = os.urandom(size * CONNECTIONS)
    with servers.fresh_folder() as folder:
        file = os.open(folder.parent / "flushed", os.O_CREAT | os.O_RDWR)
        try:
            took = []
            for _ in range(1 + FLUSHES):
                started = time.perf_counter()
                os.pwrite(file, body, 0)
                os.fdatasync(file)
                took.append(time.perf_counter() - started)
        finally:
            os.close(file)
    return statistics.median(took[1:]) / CONNECTIONS * 1e6
