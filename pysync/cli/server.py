"""`pysync serve` and `pysync check`."""

import argparse
import asyncio
import errno
import gc
import os
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from pysync import config
from pysync.cli.parser import (
    Parser,
    PrintSchema,
    add_config,
    add_storage_options,
    config_file,
    default_config,
    server_url,
)

KINDS: Final = ("open", "private", "rooms")
"""Configurations that `pysync init` prints, from the files in `config/templates/`."""
GARBAGE_THRESHOLD: Final = 10_000
"""New objects after which a server searches the youngest for garbage. The pushes that wait for a flush have
more than the usual 700, and would be searched in vain, as would the modules that it imports. No cycle holds
the body of a request."""


def add_serve(parser: Parser) -> None:
    """Add the arguments of `pysync serve`."""
    parser.describe(serve, example="pysync serve --config pysync.json --port 8080")
    add_config(parser)
    parser.add_value("--host", "HOST", "address to listen on (default: 127.0.0.1)")
    parser.add_value("--port", "PORT", "port to listen on (default: 8080)")
    parser.add_value("--admin-host", "HOST", "address of the operators' listener (default: 127.0.0.1)")
    parser.add_value("--admin-port", "PORT", "port of the operators' listener (default: there is none)")
    add_storage_options(parser)
    parser.add_value("--workers", "N", "number of processes that serve (default: 1)")


def add_init(parser: Parser) -> None:
    """Add the arguments of `pysync init`."""
    parser.describe(
        init,
        description="Prints a configuration with comments, which say how to store a first document. open: "
        "anybody at this machine reads and writes, to try pysync out; private: each user reads and writes "
        "only their own; rooms: users share what is in a room with its members.",
        example="pysync init > pysync.yaml\npysync init rooms > pysync.yaml",
    )
    parser.add_value(
        "kind", "KIND", "open, private or rooms (default: open)", nargs="?", default="open", choices=KINDS
    )


def add_check(parser: Parser) -> None:
    """Add the arguments of `pysync check`."""
    parser.describe(
        check,
        example="pysync check pysync.json --strict\npysync check pysync.json --probe --url https://sync.example.org\n"
        "pysync check --json-schema > pysync.schema.json",
    )
    parser.add_value(
        "file",
        "FILE",
        "the configuration (default: $PYSYNC_CONFIG, else ./pysync.json, .yaml or .toml)",
        nargs="?",
        default=default_config(),
        type=config_file,
    )
    parser.add_flag("--probe", "also test the store, the coordinator and this machine")
    parser.add_value(
        "--url",
        "URL",
        "with --probe: the address before /pull under which clients reach the server; test the proxy there",
        type=server_url,
    )
    parser.add_flag("--strict", "exit with status 1 if there are warnings")
    parser.add_argument(
        "--json-schema",
        action=PrintSchema,
        nargs=0,
        help="print the JSON Schema of the configuration, for editors, and exit",
    )


def init(options: argparse.Namespace) -> None:
    """Run `pysync init`."""
    from importlib.resources import files  # no other command needs it

    template = files("pysync.config") / "templates" / f"{options.kind}.yaml"
    print(template.read_text("utf-8"), end="")


def serve(options: argparse.Namespace) -> int:
    """Run `pysync serve`."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    from pysync.plugins import loader
    from pysync.server.process import serve
    from pysync.server.process.serve import origin

    flags = {
        "server.host": options.host,
        "server.port": options.port,
        "server.admin.host": options.admin_host,
        "server.admin.port": options.admin_port,
        "store": options.store,
        "coordinator": options.coordinator,
        "server.workers": options.workers,
    }
    read_config = None
    if options.config is None:
        settings = config.parse({}, os.environ, flags)
    else:
        read_config = partial(config.load, options.config, os.environ, flags)
        settings = read_config()
        loader.add_config_dir_to_path(options.config)
    notice = _warnings(settings, options.config)
    try:
        return serve.serve(settings, notice, read_config)
    except config.ConfigError as error:
        raise (error.with_file(options.config) if options.config else error) from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        url = origin(settings.server.host, settings.server.port)
        raise ValueError(f"{url}: the address is in use; choose another port with --port") from None


def add_reload(parser: Parser) -> None:
    """Add the arguments of `pysync reload`."""
    parser.describe(
        reload,
        example="pysync reload --config pysync.json\npysync reload --url http://127.0.0.1:8081",
        description="Has a running server read its configuration again and apply it as a whole, or say why "
        "not. Needs server.admin and auth.adminToken.",
    )
    add_config(parser)
    parser.add_value(
        "--url", "URL", "the operators' address (default: server.admin of the file)", type=server_url
    )
    parser.add_value("--admin-token", "TOKEN", "default: $PYSYNC_ADMIN_TOKEN, else auth.adminToken")


async def reload(options: argparse.Namespace) -> None:
    """Run `pysync reload`, and print the members that have changed. Raises what the server responds."""
    from pysync.cli.io import print_json
    from pysync.errors import Unauthorized

    url, tokens = options.url, options.admin_token or os.environ.get("PYSYNC_ADMIN_TOKEN")
    if url is None or not tokens:
        if options.config is None:
            raise ValueError("name the server's configuration with --config, or its --url and --admin-token")
        try:
            settings = config.load(options.config)
        except config.ConfigError as error:
            raise ValueError(f"{error}\n  --url and --admin-token reload without this file") from None
        url, tokens = url or _admin_url(settings), tokens or settings.auth.admin_token
    if not tokens:
        raise ValueError("auth.adminToken is not set: send the server SIGHUP")
    *others, last = [tokens] if isinstance(tokens, str) else tokens
    url = f"{url.rstrip('/')}/admin/reload"
    for token in others:  # while tokens rotate, the server may know any of them
        with suppress(Unauthorized):
            print_json(await _post(url, token))
            return
    print_json(await _post(url, last))


def _admin_url(settings: config.Config) -> str:
    """Return the URL of the operators' listener on this machine. Raises ValueError if there is none."""
    from pysync.server.process.serve import origin

    admin = settings.server.admin
    if admin is None or not admin.port:
        raise ValueError("server.admin names no port: send the server SIGHUP, or give --url")
    return origin(admin.host, admin.port)


async def _post(url: str, token: str) -> object:
    """Return the body of the response to an operator's request. Raises the error that it is, or
    Unreachable."""
    import aiohttp

    from pysync.client import Unreachable
    from pysync.errors import from_response

    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with aiohttp.ClientSession() as session, session.post(url, headers=headers) as response:
            body = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unreachable(f"{url}: {error}") from error
    if response.status != 200:
        raise from_response(response.status, body, response.headers)
    return body


def _warnings(settings: config.Config, path: str | None) -> str:
    """Return a line with the number of warnings, or these without a file; empty if there are none."""
    from pysync.config.check import lint, pluralize
    from pysync.config.loader import read_file, unread_variables

    if path is None:
        return "\n".join(f"{found.location}: {found.message}" for found in unread_variables(os.environ, {}))
    found = [*lint(settings), *unread_variables(os.environ, read_file(Path(path)))]
    line = f"{pluralize(found, 'warning')} about this configuration; see them with: "
    return line + shlex.join(["pysync", "check", path]) if found else ""


def check(options: argparse.Namespace) -> int:
    """Run `pysync check`."""
    if options.url is not None and not options.probe:
        options.parser.error("--url is for --probe")
    if options.file is None:
        options.parser.error(
            "there is no ./pysync.json, .yaml or .toml to check: name a configuration, as in `pysync check "
            "FILE`, set PYSYNC_CONFIG, or begin with `pysync init > pysync.yaml`"
        )
    from pysync.config.check import check as check_file
    from pysync.plugins import loader
    from pysync.plugins.events import events_of
    from pysync.plugins.projection import projections_of

    def use(settings: config.Config) -> object:
        return loader.load_plugins(settings, (*events_of(settings), *projections_of(settings)))

    loader.add_config_dir_to_path(options.file)
    accepted, text = check_file(options.file, validate=use, strict=options.strict)
    print(text)
    if accepted and options.probe:
        print()
        return asyncio.run(_probe(config.load(options.file), options.url))
    return 0 if accepted else 1


async def _probe(settings: config.Config, url: str | None) -> int:
    """Test what the server needs, and the proxy at `url`, print the results, and return the exit status."""
    from pysync.config.check import align_columns, format_problems
    from pysync.diagnose import ProxyProbe, Report, probe_machine, probe_stores

    findings = Report()
    await probe_stores(settings, findings)
    probe_machine(settings, findings)
    if url is not None:
        await ProxyProbe(settings, url, findings).run()
    lines = align_columns([("PROBE", "FOUND"), *findings.rows])
    for found, noun in ((findings.warnings, "warning"), (findings.problems, "problem")):
        if found:
            lines += ["", *format_problems(found, noun)]
    print("\n".join(lines))
    return 1 if findings.problems else 0
