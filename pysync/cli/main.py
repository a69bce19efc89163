"""The command line: `pysync serve`, and a small client for people and scripts.

Results are JSON on standard output (`list` prints names, `tail` elements, `watch` changes, one a line), a
problem is one line on standard error. Each command is a function of a module beside this one, imported when
it runs: `pysync --help` and `pysync serve` pay for no other. It returns the exit status, or None for success,
or a coroutine of either.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from pysync.cli.commands import build_parser

_HINTS = {
    "append_limit_exceeded": "the log is full",
    "append_proof_missing": "sign the element with --key FILE",
    "checkpoint_too_old": "older than this log allows; use -n N to read the newest elements",
    "non_monotonic_timestamp": "--ts must be greater than the timestamp of the log's last element",
    "not_found": "`pysync check` prints the paths that a configuration gives a server",
    "version_not_found": "the history of the document does not have this version, or no longer",
    "pull_bound_required": "this is a log; read it with `pysync tail`",
}
"""Advice on an error, by its code."""

OK, PROBLEM, CONFLICT, REJECTED, UNREACHABLE, MISSING = 0, 1, 3, 4, 5, 6  # 2 is argparse's


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        module, command = options.run
        status = getattr(importlib.import_module(f"pysync.cli.{module}"), command)(options)
        if not isinstance(status, int | None):
            import asyncio  # `pysync --help` needs none

            status = asyncio.run(status)
        sys.stdout.flush()
        return status or OK
    except BrokenPipeError:
        # Whoever read our output has seen enough; the flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        status = _status(error)
        print(f"pysync: {_error_message(error)}", file=sys.stderr)
        return status


def _status(error: Exception) -> int:
    """Return the exit status for an error that a user may cause; raise any other again."""
    from pysync.auth.certificates import CertificateError
    from pysync.cli.io import MissingDocument
    from pysync.client import Unreachable
    from pysync.client.sealed.crypto import SealedError
    from pysync.config import ConfigError
    from pysync.errors import Conflict, Forbidden, PysyncError, RateLimited, Unauthorized, Unavailable

    match error:
        case MissingDocument():
            return MISSING
        case Conflict():
            return CONFLICT
        case Unauthorized() | Forbidden():
            return REJECTED
        case Unreachable() | Unavailable() | RateLimited():
            return UNREACHABLE
        case PysyncError() | CertificateError() | SealedError() | ConfigError() | ValueError() | OSError():
            return PROBLEM
    raise error


def _error_message(error: Exception) -> str:
    from pysync.auth.certificates import CertificateError
    from pysync.errors import Conflict, PysyncError

    if isinstance(error, CertificateError):
        from pysync.cli.credentials import REASONS

        return REASONS.get(error.reason, error.reason)
    if isinstance(error, PysyncError) and error.code in _HINTS:
        return f"{error}: {_HINTS[error.code]}"
    if isinstance(error, Conflict):
        at = error.current_hash or "nothing yet"
        return f"{error}: the document is at {at}; use --base HASH or --force"
    if isinstance(error, FileExistsError):
        return f"{error.filename} exists already"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, PysyncError) and error.message == error.default_message and error.__cause__:
        return f"{error}: {error.__cause__}"
    return str(error)
