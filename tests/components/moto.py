"""moto's S3, with the requests one after another: by itself it checks conditions and writes without a lock.

python -m components.moto PORT
"""

import io
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from components.processes import Missing, free_port, running, serves_http
from components.s3 import S3Server

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


@contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    """moto in a process of its own. Signatures are not checked."""
    if not all(find_spec(name) for name in ("moto", "flask", "flask_cors")):
        raise Missing("moto")
    port = free_port()
    command = [sys.executable, "-m", "components.moto", str(port)]
    with running(command, folder / "moto.out", Path(__file__).parent.parent) as process:
        process.wait_until(lambda: serves_http(port))
        server = S3Server("moto", f"http://127.0.0.1:{port}")
        server.make_bucket(server.bucket)
        yield server


def one_at_a_time(application: Application) -> Application:
    """`application` behind a lock. A request is received, and its answer sent, outside of it."""
    lock = threading.Lock()

    def respond(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        _receive(environ)
        with lock:
            produced = application(environ, start_response)
            try:
                return [b"".join(produced)]
            finally:
                if close := getattr(produced, "close", None):
                    close()

    return respond


def _receive(environ: dict[str, Any]) -> None:
    """Take the body of the request from its connection."""
    source = environ["wsgi.input"]
    if environ.get("wsgi.input_terminated"):
        body = source.read()
        environ.pop("HTTP_TRANSFER_ENCODING", None)
        environ["CONTENT_LENGTH"] = str(len(body))
    else:
        body = source.read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import run_simple

    class KeptConnection(MotoRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are written apart

        def log(self, type: str, message: str, *args: Any) -> None:
            """Nothing: what is asked for is the test's business."""

    application = one_at_a_time(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, application, threaded=True, request_handler=KeptConnection)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
