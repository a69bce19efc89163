"""nginx."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.processes import Process, accepts, program, running

# One process, so that nothing stays when it is killed. Debian's nginx keeps some files elsewhere.
_CONFIGURATION = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
{http}
}}
"""


class Nginx:
    """A running nginx. `port` is one on which it listens."""

    def __init__(self, port: int, process: Process) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._process = process

    def stop(self) -> None:
        """Have it finish the requests under way and end."""
        self._process.signal(signal.SIGQUIT)
        self._process.stop()


@contextmanager
def nginx(folder: Path, http: str, port: int) -> Iterator[Nginx]:
    """nginx with `http` as what its configuration says within `http { }`, from when it listens on `port`.
    Files are named there relative to `folder`, where its errors are in `nginx.out`."""
    configuration = folder / "nginx.conf"
    configuration.write_text(_CONFIGURATION.format(http=http))
    command = [program("nginx"), "-p", f"{folder}/", "-e", "stderr", "-c", str(configuration)]
    with running(command, folder / "nginx.out", folder) as process:
        process.wait_until(lambda: accepts(port))
        yield Nginx(port, process)
