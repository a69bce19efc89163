"""The parser of command lines, and the options that several commands share."""

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

DEFAULT_URL = "http://127.0.0.1:8080"
DEFAULT_CONFIG = "pysync.json"
EXIT_CODES = """\
exit status:
  0  success
  1  invalid input: a file, a key, a configuration, a request that the server rejects,
     or an object that is damaged or cannot be copied
  2  invalid command line
  3  conflict: the document does not have the given base hash
  4  unauthorised or forbidden
  5  the server or a store is unreachable or overloaded; try again later
  6  the document or file does not exist (`pull --fail`)

environment:
  PYSYNC_URL          the server (default: http://127.0.0.1:8080)
  PYSYNC_KEY          the key file that signs requests
  PYSYNC_ADMIN_TOKEN  the admin token, for requests without a key
  PYSYNC_CONFIG       the server's configuration (default: ./pysync.json, if it exists)

`pysync COMMAND --help` shows the options of a command, with an example.
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows examples, and suggests the nearest name for a misspelled one."""

    def __init__(self, *, example: str = "", **options: Any) -> None:
        if example:
            options["epilog"] = "example:\n" + "".join(f"  {line}\n" for line in example.splitlines())
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Return the options. Exits with status 2 for an invalid command line, and with 0 after help."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def error(self, message: str) -> NoReturn:
        """Print `message`, with a suggestion if an argument is misspelled, and exit with status 2."""
        misspelled = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (--[\w-]+)", message)
        if misspelled:
            names = [
                name for action in self._actions for name in (*action.option_strings, *(action.choices or ()))
            ]
            nearest = difflib.get_close_matches(misspelled[1] or misspelled[2], names, 1)
            message += f"; did you mean {nearest[0]}?" if nearest else ""
        super().error(message)

    def runs(self, module: str, function: str) -> None:
        """Have this command run a function of a module of `pysync.cli`."""
        self.set_defaults(run=(module, function), parser=self)

    def add_commands(self) -> "argparse._SubParsersAction[Parser]":
        """Return the subparsers of this command."""
        return self.add_subparsers(required=True, metavar="COMMAND")


class PrintSchema(argparse.Action):
    """Print the JSON Schema of the configuration and exit, whatever else the command line lacks."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        """Print the schema and exit."""
        print((files("pysync.config") / "pysync.schema.json").read_text(), end="")
        parser.exit()


def add_storage_options(parser: Parser) -> None:
    """Add the options that say where documents and coordination data live."""
    parser.add_argument(
        "--store", metavar="URL", help="file:DIR (default: file:./data), s3://BUCKET/PREFIX or memory:"
    )
    parser.add_argument(
        "--coordinator",
        metavar="URL",
        help="file:DIR, redis://HOST:PORT/NUMBER or memory: (default: the store's folder, else memory:)",
    )


def add_config(parser: Parser, *, required: bool = False) -> None:
    """Add `--config`, with the default that the environment and the working folder give."""
    default = default_config()
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=default,
        required=required and default is None,
        help="the server's configuration: JSON, YAML or TOML (default: $PYSYNC_CONFIG, else ./pysync.json)",
    )


def default_config() -> str | None:
    """Return the configuration file that is used if none is named; None without one."""
    return os.environ.get("PYSYNC_CONFIG") or (DEFAULT_CONFIG if Path(DEFAULT_CONFIG).is_file() else None)


def add_issuer(parser: Parser) -> None:
    """Add `--key`, the key that signs certificates."""
    default = os.environ.get("PYSYNC_KEY") or None
    parser.add_argument(
        "--key",
        metavar="FILE",
        default=default,
        required=default is None,
        help="the issuer's key file (default: $PYSYNC_KEY)",
    )


def add_trust(parser: Parser) -> None:
    """Add the options that say whom the reader of a keyring trusts."""
    parser.add_argument(
        "--trust",
        metavar="FILE",
        action="append",
        default=[],
        help="keys of another person who may add recipients, as `keys show` prints them; repeatable",
    )
    parser.add_argument(
        "--min-epoch",
        metavar="N",
        type=int,
        default=1,
        help="reject a keyring that is older than this epoch, the latest that you saw",
    )


def add_client(parser: Parser) -> None:
    """Add the options of commands that talk to a server."""
    add_server(parser)
    parser.add_argument(
        "--key", metavar="FILE", help="sign requests with this key file (default: $PYSYNC_KEY)"
    )
    parser.add_argument("--cap", metavar="FILE", help="present this certificate (default: the key's own)")
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="use the collections under /v1/NAME; the server's mount path must be /v1 or empty",
    )
    parser.add_argument("--admin-token", metavar="TOKEN", help="default: $PYSYNC_ADMIN_TOKEN")


def add_server(parser: Parser) -> None:
    """Add `--server`."""
    parser.add_argument(
        "--server",
        metavar="URL",
        type=server_url,
        default=os.environ.get("PYSYNC_URL", DEFAULT_URL),
        help="default: $PYSYNC_URL, else " + DEFAULT_URL,
    )


def server_url(text: str) -> str:
    """Return `text` if it is the URL of a server. Raises ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}: begin it with http:// or https://")
    return text
