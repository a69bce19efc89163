"""Addresses of clients, as requests are counted by them."""

import pytest

from pysync.auth.addresses import network_of


@pytest.mark.parametrize(
    ("ip", "counted"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002::/64"),
        ("2001:db8:1:2::1%eth0", "20010db800010002::/64"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_address_counts_as_its_network(ip: str, counted: str) -> None:
    assert network_of(ip) == counted


def test_two_networks_are_counted_apart() -> None:
    assert network_of("2001:db8:1:2::1") != network_of("2001:db8:1:3::1")
