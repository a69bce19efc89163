"""The parts of requests that benches build."""

BASE = "http://127.0.0.1:8080"


def parts(request: bytes) -> tuple[str, str, dict[str, str], bytes]:
    """Return method, path, headers and body of a request in bytes."""
    head, body = request.split(b"\r\n\r\n", 1)
    line, *headers = head.decode().split("\r\n")
    method, path, _ = line.split(" ")
    return method, path, dict(header.split(": ", 1) for header in headers), body
