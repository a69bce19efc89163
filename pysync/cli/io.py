"""Input and output of the commands. The file name `-` stands for standard input."""

import asyncio
import io
import json
import re
import select
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import orjson

from pysync.auth import certificates
from pysync.auth.certificates import Certificate
from pysync.auth.identity_keys import IdentityKeys


class MissingDocument(ValueError):
    """`pull --fail` found nothing at the key."""


def read_bytes(name: str) -> bytes:
    """Return the content of a file, or of standard input for `-`."""
    return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


def read_object(name: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError with the name of the file."""
    return parse_object(read_bytes(name), _display_name(name))


def parse_object(text: str | bytes, display_name: str) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises ValueError with `display_name`."""
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise ValueError(f"{display_name}: {_why_not_json(text, error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{display_name}: expected a JSON object")
    return value


def _why_not_json(text: str | bytes, error: ValueError) -> str:
    """Explain why `text` is not JSON. Python and many other programs write NaN and Infinity."""

    def reject(token: str) -> None:
        raise ValueError(f"JSON has no number {token}: write null, or leave the member out")

    try:
        json.loads(text, parse_constant=reject)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return f"not JSON: {error}"
    except ValueError as found:
        return str(found)
    return f"not JSON: {error}"


def read_keys(name: str) -> IdentityKeys:
    """Return the keys in a key file. Raises ValueError with the name of the file."""
    try:
        return IdentityKeys.from_json(read_bytes(name))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{_display_name(name)}: not a key file: not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{_display_name(name)}: {error}") from None


def read_public_keys(name: str) -> tuple[str, str]:
    """Return the Ed25519 and X25519 public keys of a key file, or of the output of `keys show`."""
    members = read_object(name)
    keys = (members.get("edPub"), members.get("kemPub"))
    if not all(isinstance(key, str) and re.fullmatch("[0-9a-f]{64}", key) for key in keys):
        raise ValueError(f"{_display_name(name)}: edPub and kemPub must be 64 hex digits")
    return str(keys[0]), str(keys[1])


def read_certificate(name: str) -> Certificate:
    """Return the certificate in a file, stored as JSON or as an Authorization header. Raises ValueError with
    the name of the file and the reason."""
    content = read_bytes(name).strip()
    try:
        if content.startswith(certificates.SCHEME.encode()):
            return certificates.from_authorization(content.decode("ascii", "replace"))
        return certificates.parse(content)
    except certificates.CertificateError as error:
        raise ValueError(f"{_display_name(name)}: not a certificate: {error.reason}") from None


def _display_name(name: str) -> str:
    return "standard input" if name == "-" else name


def print_json(value: object) -> None:
    """Print `value` as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_lines(*values: object) -> None:
    """Print each value as one line of JSON, and flush, for a reader that waits for more."""
    for value in values:
        print(json.dumps(value, ensure_ascii=False))
    sys.stdout.flush()


READER_CHECK_S: Final = 2.0


async def run_until_reader_closes(work: Coroutine[None, None, None]) -> None:
    """Run `work`, and raise BrokenPipeError once nobody reads standard output. The next line may be hours
    away, so a failed write would come too late."""
    working, unread = asyncio.ensure_future(work), asyncio.ensure_future(_stdout_closed())
    try:
        await asyncio.wait((working, unread), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise BrokenPipeError
    finally:
        working.cancel()
        unread.cancel()
        await asyncio.gather(working, unread, return_exceptions=True)


def warn_disconnected(error: Exception) -> None:
    """Report that a stream was interrupted and is being restored."""
    print(f"pysync: {error}; reconnecting", file=sys.stderr)


def warn_retry(error: Exception, wait_s: float) -> None:
    """Report on a terminal that a request failed and is repeated."""
    if sys.stderr.isatty():
        print(f"pysync: {error}; trying again in {wait_s:.1f} s", file=sys.stderr)


def warn_silence(seconds: float) -> None:
    """Report on a terminal that the server has not answered yet."""
    if sys.stderr.isatty():
        text = f"no answer for {seconds:g} s; waiting, and trying again if none comes"
        print(f"pysync: {text}", file=sys.stderr)


def show_progress(done: int, size: int | None) -> None:
    """Show on a terminal how much of a file is transferred."""
    if sys.stderr.isatty():
        of_all = "" if size is None else f" of {size / 1e6:.1f}"
        end = "\n" if done == size else ""
        print(f"\r{done / 1e6:.1f}{of_all} MB", end=end, file=sys.stderr, flush=True)


async def _stdout_closed() -> None:
    """Return once the reader of standard output has closed it; never if that is no file."""
    try:
        output = sys.stdout.fileno()
    except io.UnsupportedOperation:
        await asyncio.get_running_loop().create_future()
    while True:
        await asyncio.sleep(READER_CHECK_S)
        reader = select.poll()
        reader.register(output, 0)  # asks for nothing but errors, among them that one
        if reader.poll(0):
            return
