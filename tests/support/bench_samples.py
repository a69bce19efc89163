"""What the tests of benches share."""

BASE = "http://127.0.0.1:8080"


def parts(request: bytes) -> tuple[str, str, dict[str, str], bytes]:
    """Method, path, headers and body of a request's bytes."""
    head, body = request.split(b"\r\n\r\n", 1)
    line, *headers = head.decode().split("\r\n")
    method, path, _ = line.split(" ")
    return method, path, dict(header.split(": ", 1) for header in headers), body
