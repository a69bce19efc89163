"""Caddy."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.processes import Process, program, running

# It asks nobody for a certificate, keeps its files in its folder, and is reached from this machine alone.
_OPTIONS = """{{
	admin off
	skip_install_trust
	auto_https disable_redirects
	default_bind 127.0.0.1
	storage file_system {folder}/storage
"""


class Caddy:
    """A running Caddy. `authority` is the file with the certificate of its own authority."""

    def __init__(self, port: int, authority: Path, process: Process) -> None:
        self.port = port
        self.url = f"https://localhost:{port}"
        self.authority = authority
        self.process = process

    def responds(self) -> bool:
        """True once it has a certificate that the authority signed."""
        trusting = ssl.create_default_context(cafile=str(self.authority))
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=1) as plain,
            trusting.wrap_socket(plain, server_hostname="localhost"),
        ):
            return True


@contextmanager
def caddy(folder: Path, caddyfile: str, port: int) -> Iterator[Caddy]:
    """Caddy with this Caddyfile, which begins with its global options and serves `localhost` at `port`, from
    when it does so over TLS. Its errors are in `caddy.out` in `folder`."""
    configuration = folder / "Caddyfile"
    assert "\n{\n" in caddyfile
    options = _OPTIONS.format(folder=folder)
    configuration.write_text(caddyfile.replace("\n{\n", f"\n{options}", 1))
    command = [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(configuration)]
    with running(["env", f"HOME={folder}", *command], folder / "caddy.out", folder) as process:
        server = Caddy(port, folder / "storage/pki/authorities/local/root.crt", process)
        process.wait_until(server.responds)
        yield server
