"""The command line: `pysync serve`, and a small client for people and scripts.

Results are JSON on standard output (`list` prints names, `tail` elements, `watch` and `changes` changes, one
a line), a problem is one line on standard error. Each subject is a module beside this one: it has the
arguments, help and examples of its commands, and the functions that run them. It is imported when one of its
commands is on the command line, so that `pysync --help` and `pysync serve` pay for no other. A function
returns the exit status, or None for success, or a coroutine of either.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from pysync import __version__
from pysync.cli.parser import EXIT_CODES, Parser

_COMMANDS: Final = {
    "for clients": (
        ("keys", "credentials", "create and show keys"),
        ("cap", "credentials", "issue, show and revoke certificates"),
        ("pull", "documents", "print a document, or download a file with --out"),
        ("push", "documents", "create or replace a document, or upload a file with --type"),
        ("delete", "documents", "delete a document, a file or a log"),
        ("list", "documents", "print the names in a collection, one a line"),
        ("history", "documents", "print the versions of a document that the server keeps, the newest first"),
        ("batch", "documents", "print documents of several collections, read with one request"),
        ("export", "export", "write the documents of collections to a folder of JSON files"),
        ("import", "export", "store the documents of a folder of JSON files"),
        ("append", "logs", "append an element to a log, with a proof of its author if there is a key"),
        ("tail", "logs", "print the newest elements of a log, one a line"),
        ("changes", "logs", "print what changed since a cursor, one document a line"),
        ("watch", "logs", "print changes as they happen, one a line"),
        ("usage", "documents", "print what you use of your quotas, and what you may"),
        ("keyring", "documents", "manage who can read sealed data"),
        ("help", "main", "show this help, or that of a command"),
    ),
    "for operators": (
        ("init", "server", "print a configuration to begin with"),
        ("check", "server", "validate a configuration and print its routes"),
        ("reload", "server", "have a running server apply its changed configuration"),
        ("serve", "server", "run the server"),
        ("stats", "stats", "print what uses space in a store, with the largest documents"),
        ("get", "stats", "print one document, log or file from the store, without a server"),
        ("copy", "stores", "copy a store to another one; run it again to continue or catch up"),
        ("verify", "stores", "read everything in a store and list what is damaged"),
        ("gc", "stores", "delete what crashes and interrupted requests left in a store"),
        ("erase", "stores", "erase a document, a folder or a person, with every trace"),
        ("project", "stores", "maintain the lists of projections"),
        ("backup", "backup", "back up a store, and list, verify, prune and restore backups"),
        ("events", "events", "compact and query the files of events"),
        ("bench", "bench", "load-test a server that has a manifest (configEndpoint)"),
    ),
}
"""The groups of commands. Of each: its name, the module that adds its arguments with `add_NAME`, its help."""

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


def build_parser() -> Parser:
    """Return the parser of the whole command line. `run` of its result is the function of the command."""
    parser = Parser(
        prog="pysync",
        description="Keep documents in sync: the server, and a client for people and scripts.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"pysync {__version__}")
    for group, commands in _COMMANDS.items():
        for name, module, help_text in commands:
            parser.add_command(name, help_text, group=group, add_arguments=_add_arguments(module, name))
    return parser


def add_help(parser: Parser) -> None:
    """Add the arguments of `pysync help`."""
    parser.describe(show_help, example="pysync help\npysync help backup restore")
    parser.add_value("command", "COMMAND", "a command, and one of those below it", nargs="*")


def show_help(options: argparse.Namespace) -> None:
    """Run `pysync help`."""
    build_parser().parse_args([*options.command, "--help"])


def _add_arguments(module: str, name: str) -> Callable[[Parser], None]:
    """Return a function that adds the arguments of a command, whose module it imports."""

    def add(parser: Parser) -> None:
        getattr(importlib.import_module(f"pysync.cli.{module}"), f"add_{name}")(parser)

    return add


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status = options.run(options)
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
        status = exit_status(error)
        print(f"pysync: {error_message(error)}", file=sys.stderr)
        return status


def exit_status(error: Exception) -> int:
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


def error_message(error: Exception) -> str:
    """Return what is wrong, and what to do about it if that is known."""
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
