"""Admission of unknown certificates: bounds on the work that strangers can cause with forged ones.

A request whose certificate is in the cache passes. For any other certificate the server asks first

- how many requests from the same address have failed lately (`FailureLog`),
- whether the same text was a forgery a minute ago,
- how much processor time is left for certificates that are not known (`VerificationBudget`).

Each of these costs a lookup, while the verification of a signature costs a hundred times as much.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

from pysync.auth.verification import open_certificate
from pysync.errors import Overloaded, Unauthorized

MAX_ADDRESSES: Final = 20_000
"""Addresses whose failures are remembered, each in about 200 bytes."""
BURST_SHARE: Final = 6
"""One address may use a sixth of a minute's failures at once."""
MAX_WAIT_MS: Final = 1_000
"""Milliseconds without failures after which an address is admitted again."""

BUDGET_PER_S: Final = 0.2
"""Seconds of processor time per second that verifying unknown certificates may take."""
BURST_S: Final = 0.5
"""Seconds of processor time that may be used at once, such as after a start, when all are unknown."""

FORGERY_MS: Final = 60_000
"""Milliseconds for which a forged certificate is remembered, or up to twice as long."""
MAX_FORGERIES: Final = 20_000

MAX_IP_LENGTH: Final = 45
"""Characters of the longest IPv6 address."""

REFUSED_METRIC: Final = "pysync_certificates_refused"


def network_of(ip: str) -> str:
    """Return the address under which a client's requests are counted: its IPv4 address, or the /64 network of
    its IPv6 address, which belongs to one customer."""
    if ":" not in ip:
        return ip
    try:
        address = IPv6Address(ip.partition("%")[0])
    except ValueError:
        return ip
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{int(address) >> 64:016x}::/64"


def forwarded_ip(forwarded_for: str, hops: int) -> str | None:
    """Return the address in `X-Forwarded-For` that the outermost of `hops` trusted proxies saw; None if there
    is none. The zone of a link-local address, which may be any text, is left out."""
    seen = forwarded_for.rsplit(",", hops)
    if len(seen) < hops:
        return None
    return _canonical_ip(seen[-hops].strip().partition("%")[0][:MAX_IP_LENGTH])


@lru_cache(maxsize=4096)
def _canonical_ip(text: str) -> str | None:
    try:
        return str(ip_address(text))
    except ValueError:
        return None


class FailureLog:
    """The failed requests of addresses, `per_minute` of which one address may have (0: any number). An
    address that has more is refused until it has made none for a second. `elapsed_ms` is the clock."""

    def __init__(self, per_minute: int, elapsed_ms: Callable[[], int]) -> None:
        self._interval_ms = 60_000 / per_minute if per_minute else 0.0
        self._burst_ms = 60_000 / BURST_SHARE
        self._elapsed_ms = elapsed_ms
        self._settled_ms: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._settled_ms)

    def add(self, address: str) -> None:
        """Count a failed request."""
        if not self._interval_ms:
            return
        now_ms = self._elapsed_ms()
        settled_ms = max(now_ms, self._settled_ms.pop(address, 0.0)) + self._interval_ms
        self._settled_ms[address] = min(settled_ms, now_ms + self._burst_ms + MAX_WAIT_MS)
        if len(self._settled_ms) > MAX_ADDRESSES:
            del self._settled_ms[next(iter(self._settled_ms))]

    def wait_ms(self, address: str) -> float:
        """Return the milliseconds after which an address has few enough failures; 0 or less if it has now."""
        settled_ms = self._settled_ms.get(address)
        return 0.0 if settled_ms is None else settled_ms - self._elapsed_ms() - self._burst_ms


class VerificationBudget:
    """The processor time for certificates that are not known. The second half of it is left to addresses that
    used less than their fair share in the last second. `elapsed_ms` is the clock."""

    def __init__(self, elapsed_ms: Callable[[], int]) -> None:
        self._elapsed_ms = elapsed_ms
        self._left_s = BURST_S
        self._at_ms = elapsed_ms()
        self._used_s: dict[str, float] = {}
        self._all_used_s = 0.0
        self._used_since_ms = self._at_ms

    def admits(self, address: str) -> bool:
        """Return True if there is time for a certificate that this address presents."""
        now_ms = self._elapsed_ms()
        passed_ms = max(0, now_ms - self._at_ms)
        self._left_s = min(BURST_S, self._left_s + passed_ms / 1000 * BUDGET_PER_S)
        self._at_ms = now_ms
        if now_ms - self._used_since_ms >= 1000:
            self._used_s.clear()
            self._all_used_s = 0.0
            self._used_since_ms = now_ms
        if self._left_s <= 0:
            return False
        used_s = self._used_s.get(address, 0.0)
        return self._left_s > BURST_S / 2 or used_s * (len(self._used_s) + 1) <= self._all_used_s

    def spend(self, address: str, seconds: float) -> None:
        """Note that verifying a certificate of this address took so long."""
        self._left_s -= seconds
        self._all_used_s += seconds
        self._used_s[address] = self._used_s.get(address, 0.0) + seconds


class CertificateGate:
    """Opens the unknown certificates for which there is time. `count` increments a metric, and `cpu_s` is the
    processor time that this thread has used, in seconds."""

    def __init__(
        self,
        failures_per_minute: int,
        elapsed_ms: Callable[[], int],
        count: Callable[[str, str], None],
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.failures: Final = FailureLog(failures_per_minute, elapsed_ms)
        self._budget = VerificationBudget(elapsed_ms)
        self._elapsed_ms = elapsed_ms
        self._count = count
        self._cpu_s = cpu_s
        self._forged = set[int]()
        self._forged_before = set[int]()
        self._forged_since_ms = elapsed_ms()

    def open(self, authorization: str, address: str) -> tuple[bytes, tuple[str, int, int]]:
        """Return the certificate of a header as `open_certificate`. Raises Unauthorized if it is forged, and
        Overloaded if it is not examined."""
        wait_ms = self.failures.wait_ms(address)
        if wait_ms > 0:
            self._count(REFUSED_METRIC, "address")
            raise Overloaded(retry_after_s=int(-(-wait_ms // 1000)))
        # Python's hashes of text are keyed with a secret, so nobody can forge for the hash of another.
        digest = hash(authorization)
        if self._is_known_forgery(digest):
            self._count(REFUSED_METRIC, "forged")
            raise Unauthorized("certificate: forged or malformed, as it was before")
        if not self._budget.admits(address):
            self._count(REFUSED_METRIC, "budget")
            raise Overloaded
        with self.charged(address):
            try:
                return open_certificate(authorization)
            except Unauthorized:
                self._forged.add(digest)
                raise

    @contextmanager
    def charged(self, address: str) -> Iterator[None]:
        """Take the processor time of a block that does not await from the budget."""
        began_s = self._cpu_s()
        try:
            yield
        finally:
            self._budget.spend(address, self._cpu_s() - began_s)

    def _is_known_forgery(self, digest: int) -> bool:
        if self._elapsed_ms() - self._forged_since_ms >= FORGERY_MS or len(self._forged) >= MAX_FORGERIES:
            self._forged_before, self._forged = self._forged, set()
            self._forged_since_ms = self._elapsed_ms()
        return digest in self._forged or digest in self._forged_before
