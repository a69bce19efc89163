"""Reports to systemd, if it started this process with `Type=notify`."""

import os
import socket
from contextlib import suppress


def sd_notify(text: str) -> None:
    """Send lines of `NAME=value`, such as `READY=1`, to systemd. It never waits, and an error is ignored.
    Without `NOTIFY_SOCKET` in the environment nothing happens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # of the abstract namespace
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(text.encode(), address)
