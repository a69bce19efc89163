"""`docs/reference/command-line.md` and `exit-codes.md`, from the argument parser."""

import argparse
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from pysync.cli.main import build_parser
from pysync.cli.parser import EXIT_CODES, Parser

HEAD = """\
# Command line

Generated from the argument parser by `make reference`.

`pysync` runs the server, issues keys and certificates, and is a small client for people and scripts. Results
are JSON on standard output, problems are one line on standard error. [Exit codes](exit-codes.md) tell scripts
what happened.

`pysync serve` also reads [variables](configuration.md#environment-variables) that set single members.
All commands read these:

| Variable | Meaning |
|---|---|
"""

EXIT_CODES_HEAD = """\
# Exit codes

Generated from the argument parser by `make reference`.

Every command of `pysync` exits with one of these codes. `pysync serve` exits with 0 after a graceful
shutdown.

| Code | Meaning |
|---|---|
"""

EXIT_CODES_FOOT = """\
| 130 | interrupted with Ctrl-C |

A script can rely on them. For example, retry on 5 and merge on 3:

    pysync push notes/hello note.json --base "$HASH" || case $? in
      3) echo "someone else changed the document: pull, merge and push again" ;;
      5) echo "the server cannot be reached now: try again later" ;;
    esac
"""


def page() -> str:
    """The page about every command, with a final line break."""
    os.environ["PYSYNC_CONFIG"] = "pysync.json"  # so that the configuration is shown as optional
    environment = re.findall(r"^ +(PYSYNC_\w+) +(.*)$", EXIT_CODES, re.M)
    rows = "".join(f"| `{name}` | {_cell(meaning)} |\n" for name, meaning in environment)
    return "\n".join([HEAD + rows, *_sections(build_parser(), "pysync", "##")])


def exit_codes_page() -> str:
    """The page about exit codes, from the text that `pysync --help` shows."""
    text = re.sub(r"\n {5,}", " ", EXIT_CODES)
    rows = [f"| {code} | {meaning} |\n" for code, meaning in re.findall(r"^ +(\d+) +(.*)$", text, re.M)]
    return EXIT_CODES_HEAD + "".join(rows) + EXIT_CODES_FOOT


def _sections(parser: Parser, command: str, level: str) -> Iterator[str]:
    """The sections of the commands below `parser`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                subparser.load()
                yield _section(subparser, f"{command} {name}", subparser.summary, level)
                yield from _sections(subparser, f"{command} {name}", f"{level}#")


def _section(parser: argparse.ArgumentParser, command: str, summary: str, level: str) -> str:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    arguments = [action for action in actions if not isinstance(action, argparse._SubParsersAction)]
    positional = " ".join(_positional(action) for action in arguments if not action.option_strings)
    required = " ".join(_spelled(action) for action in arguments if action.option_strings and action.required)
    has_commands = len(arguments) < len(actions)
    is_optional = any(action.option_strings and not action.required for action in arguments)
    parts = (command, "COMMAND" * has_commands, positional, required, "[options]" * is_optional)
    text = f"{level} {command}\n\n{_sentence(summary)}\n"
    if parser.description:
        text += f"\n{_plain(parser.description)}\n"
    text += f"\n    {' '.join(filter(None, parts))}\n"
    if arguments:
        formatter = parser._get_formatter()
        helps = [formatter._expand_help(action) if action.help else "" for action in arguments]
        rows = [
            f"| `{_cell(_spelled(action))}` | {_cell(shown)} |\n"
            for action, shown in zip(arguments, helps, strict=True)
        ]
        text += "\n| Argument | Meaning |\n|---|---|\n" + "".join(rows)
    if parser.epilog:
        example = textwrap.dedent(parser.epilog.removeprefix("example:\n"))
        text += "\nExample:\n\n" + textwrap.indent(example, "    ")
    return text


def _positional(action: argparse.Action) -> str:
    name = _value(action)
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _spelled(action: argparse.Action) -> str:
    """The argument as it is typed: `--base HASH`, `-n N`, `KEY`."""
    if not action.option_strings:
        return _value(action)
    value = "" if action.nargs == 0 else f" {_value(action)}"
    return ", ".join(action.option_strings) + value


def _value(action: argparse.Action) -> str:
    if action.metavar is not None:
        return str(action.metavar)
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return action.dest.upper()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def _plain(text: Any) -> str:
    return " ".join(str(text).split())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
