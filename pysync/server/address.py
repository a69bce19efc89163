"""An address that several workers listen on, kept for them from before the first until after the last."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """Keep an address for the workers of this process and yield its port; port 0 takes a free one.

    Workers listen with SO_REUSEPORT, and with that alone a second service of the same user would quietly get
    half of the connections. So the address is first taken as by a single process, and only then shared.
    Raises OSError where it is taken, or cannot be had.
    """
    with ExitStack() as kept:
        for family, kind, protocol, _, address in _addresses(host):
            sock = kept.enter_context(socket.socket(family, kind, protocol))
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # To bind it while connections of an earlier service linger; nobody else may after us.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((address[0], port, *address[2:]))
            except OSError as error:
                reason = os.strerror(error.errno or 0).lower()
                raise OSError(error.errno, f"cannot listen on {address[0]} port {port}: {reason}") from error
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = sock.getsockname()[1]
        yield port


def _addresses(host: str) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    """What `host` stands for, each once."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(found))
