"""The addresses of clients: behind proxies, and as the networks under which their requests are counted."""

from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

MAX_IP_LENGTH: Final = 45
"""Characters of the longest IPv6 address."""


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
