"""The parser of command lines, and the options that several commands share."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NoReturn

DEFAULT_URL = "http://127.0.0.1:8080"
CONFIG_NAMES = tuple(f"pysync.{suffix}" for suffix in ("json", "yaml", "yml", "toml"))
_AND = " and "
EXIT_CODES = """\
exit status:
  0  success
  1  invalid input: a file, a key, a configuration, a request that the server rejects,
     or an object that is damaged or cannot be copied
  2  invalid command line
  3  conflict: the document is at another version than the given or exported one
  4  unauthorised or forbidden
  5  the server or a store is unreachable or overloaded; try again later
  6  the document, version or file does not exist (`pull --fail`, `get`)

environment:
  PYSYNC_URL          the server (default: http://127.0.0.1:8080)
  PYSYNC_KEY          the key file that signs requests
  PYSYNC_ADMIN_TOKEN  the admin token, for requests without a key
  PYSYNC_CONFIG       the server's configuration (default: ./pysync.json, .yaml or .toml, if it exists)

`pysync help COMMAND` shows the options of a command, with an example.
"""


Run = Callable[[argparse.Namespace], object]
"""Runs a command with its options."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that shows examples, adds the arguments of a command when it is parsed, and suggests
    the nearest name for a misspelled one."""

    def __init__(self, *, add_arguments: "Callable[[Parser], None] | None" = None, **options: Any) -> None:
        """`add_arguments` adds the arguments when the command is parsed."""
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._add_arguments = add_arguments
        self._commands: argparse._SubParsersAction[Parser] | None = None
        self._groups: dict[str, dict[str, str]] = {}
        self.summary = ""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Return the options. Exits with status 2 for an invalid command line, and with 0 after help."""
        options: argparse.Namespace
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options and the arguments that are unknown."""
        self.load()
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Add the arguments of the command, unless they were added."""
        add, self._add_arguments = self._add_arguments, None
        if add is not None:
            add(self)

    def error(self, message: str) -> NoReturn:
        """Print `message`, with a suggestion if an argument is misspelled, and exit with status 2."""
        misspelled = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (--[\w-]+)", message)
        if misspelled:
            import difflib  # a correct command line needs none

            names = [
                name for action in self._actions for name in (*action.option_strings, *(action.choices or ()))
            ]
            nearest = difflib.get_close_matches(misspelled[1] or misspelled[2], names, 1)
            message += f"; did you mean {nearest[0]}?" if nearest else ""
        super().error(message)

    def format_help(self) -> str:
        """Return the help, with the commands of each group together."""
        if self._groups:
            listing = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
            for title, commands in self._groups.items():
                group = listing.add_argument_group(f"commands {title}")
                for name, help_text in commands.items():
                    group.add_argument(name, help=help_text)
            self.description = f"{self.description}\n\n{listing.format_help().strip()}"
            self._groups = {}
        return super().format_help()

    def add_command(
        self,
        name: str,
        help_text: str,
        run: Run | None = None,
        *,
        group: str = "",
        add_arguments: "Callable[[Parser], None] | None" = None,
        **described: Any,
    ) -> "Parser":
        """Add a command, which `add_arguments` completes, or `run` with the other arguments of `describe`.
        Help lists it below its `group`, which all have or none."""
        if self._commands is None:
            # A command that runs by itself, too, such as `backup`, need not be followed by another one.
            self._commands = self.add_subparsers(required=self.get_default("run") is None, metavar="COMMAND")
        if group:
            self._groups.setdefault(group, {})[name] = help_text
            command = self._commands.add_parser(name, add_arguments=add_arguments)
        else:
            command = self._commands.add_parser(name, help=help_text, add_arguments=add_arguments)
        command.summary = help_text
        if run is not None:
            command.describe(run, **described)
        return command

    def describe(self, run: Run, *, example: str, description: str | None = None) -> None:
        """Set the function that runs the command, and what its help shows."""
        self.description = description
        self.epilog = "example:\n" + "".join(f"  {line}\n" for line in example.splitlines())
        self.set_defaults(run=run, parser=self)

    def add_value(self, name: str, metavar: str, help_text: str, **options: Any) -> None:
        """Add an argument or an option that has a value."""
        self.add_argument(name, metavar=metavar, help=help_text, **options)

    def add_flag(self, name: str, help_text: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help_text)


class PrintSchema(argparse.Action):
    """Print the JSON Schema of the configuration and exit, whatever else the command line lacks."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        """Print the schema and exit."""
        from importlib.resources import files  # no other command line needs it

        print((files("pysync.config") / "pysync.schema.json").read_text(), end="")
        parser.exit()


def add_storage_options(parser: Parser) -> None:
    """Add the options that say where documents and coordination data live."""
    parser.add_value("--store", "URL", "file:DIR (default: file:./data), s3://BUCKET/PREFIX or memory:")
    parser.add_value(
        "--coordinator",
        "URL",
        "file:DIR, redis://HOST:PORT/NUMBER or memory: (default: the store's folder, else memory:)",
    )


def add_config(parser: Parser, *, required: bool = False) -> None:
    """Add `--config`, with the default that the environment and the working folder give."""
    default = default_config()
    parser.add_value(
        "--config",
        "FILE",
        "the server's configuration (default: $PYSYNC_CONFIG, else ./pysync.json, .yaml or .toml)",
        default=default,
        type=config_file,
        required=required and default is None,
    )


def default_config() -> str | None:
    """Return the configuration file that is used if none is named; None without one. For several in the
    working folder, return all names in one, which `config_file` rejects."""
    return os.environ.get("PYSYNC_CONFIG") or _AND.join(filter(os.path.isfile, CONFIG_NAMES)) or None


def config_file(name: str) -> str:
    """Return `name` unless it stands for several default files. Raises ArgumentTypeError."""
    if len(names := name.split(_AND)) > 1 and set(names) <= set(CONFIG_NAMES):
        raise argparse.ArgumentTypeError(f"{name}: keep one of them here, or name one")
    return name


def add_issuer(parser: Parser) -> None:
    """Add `--key`, the key that signs certificates."""
    default = os.environ.get("PYSYNC_KEY") or None
    parser.add_value(
        "--key",
        "FILE",
        "the issuer's key file (default: $PYSYNC_KEY)",
        default=default,
        required=default is None,
    )


def add_trust(parser: Parser) -> None:
    """Add the options that say whom the reader of a keyring trusts."""
    parser.add_value(
        "--trust",
        "FILE",
        "keys of another person who may add recipients, as `keys show` prints them; repeatable",
        action="append",
        default=[],
    )
    parser.add_value(
        "--min-epoch",
        "N",
        "reject a keyring that is older than this epoch, the latest that you saw",
        type=int,
        default=1,
    )


def add_client(parser: Parser) -> None:
    """Add the options of commands that talk to a server."""
    add_server(parser)
    parser.add_value("--key", "FILE", "sign requests with this key file (default: $PYSYNC_KEY)")
    parser.add_value("--cap", "FILE", "present this certificate (default: the key's own)")
    parser.add_value(
        "--namespace",
        "NAME",
        "use the collections under /v1/NAME; the server's mount path must be /v1 or empty",
    )
    parser.add_value("--admin-token", "TOKEN", "default: $PYSYNC_ADMIN_TOKEN")


def seconds(text: str) -> float:
    """Return the number in `text` if it is more than 0. Raises ArgumentTypeError."""
    try:
        if 0 < (value := float(text)) < inf:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: give a number of seconds, more than 0")


def add_server(parser: Parser) -> None:
    """Add `--server` and `--timeout`."""
    parser.add_value(
        "--server",
        "URL",
        "default: $PYSYNC_URL, else " + DEFAULT_URL,
        type=server_url,
        default=os.environ.get("PYSYNC_URL", DEFAULT_URL),
    )
    parser.add_value(
        "--timeout",
        "SECONDS",
        "how long an attempt at a request may take, or a transfer of a file be silent (default: 30)",
        type=seconds,
        default=30.0,
    )


def server_url(text: str) -> str:
    """Return `text` if it is the URL of a server. Raises ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}: begin it with http:// or https://")
    return text
