"""What may be said on the command line, and its help."""

import argparse
import os

from pysync import __version__

DEFAULT_URL = "http://127.0.0.1:8080"
EXIT_CODES = """\
exit status:
  0  done
  1  a problem with the input: a file, a key, a configuration, a request that the server rejects,
     an object that is damaged or cannot be copied
  2  a command line that is not understood
  3  conflict: the document is not at the given base
  4  not authorized, or forbidden
  5  the server, or a store, cannot be reached, or cannot serve now
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Its result has `run`: a command's module and function."""
    parser = argparse.ArgumentParser(
        prog="pysync",
        description="Keep documents in sync: the service, and a client for people and scripts.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pysync {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the service")
    serve.add_argument("--config", metavar="FILE", help="JSON, YAML or TOML")
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", help="port to listen on (default: 8080)")
    _add_storage_options(serve)
    serve.add_argument("--workers", metavar="N", help="processes that serve (default: 1)")
    serve.set_defaults(run=("serve", "serve"))

    check = commands.add_parser("check", help="validate a configuration and print its routes")
    check.add_argument("file", metavar="FILE")
    check.add_argument(
        "--probe", action="store_true", help="also open the store and the coordinator, and test them"
    )
    check.add_argument("--strict", action="store_true", help="exit with status 1 if there are warnings")
    check.set_defaults(run=("serve", "check"))

    _add_keys(commands.add_parser("keys", help="make and show keys"))
    _add_caps(commands.add_parser("cap", help="make, show and revoke certificates"))

    pull = commands.add_parser("pull", help="print a document; with --out: get a file")
    pull.add_argument("document", metavar="KEY", help="its path after /pull/")
    pull.add_argument("--data", action="store_true", help="print the data alone")
    pull.add_argument("--out", metavar="FILE", help="get the file at KEY as it is (-: stdout)")
    pull.add_argument("--open", metavar="NAME", help="with --out: open it with this keyring")
    _add_trust(pull)
    _add_client(pull)
    pull.set_defaults(run=("documents", "pull"))

    push = commands.add_parser(
        "push", help="store a document; without --base or --force: create it; with --type: store a file"
    )
    push.add_argument("document", metavar="KEY", help="its path after /push/")
    push.add_argument(
        "file", metavar="FILE", nargs="?", default="-", help="a JSON object, or any file (default: -, stdin)"
    )
    push.add_argument("--type", metavar="TYPE", help="store FILE as it is, as this: image/png, ...")
    push.add_argument("--seal", metavar="NAME", help="store FILE sealed, for the recipients of this keyring")
    _add_trust(push)
    base = push.add_mutually_exclusive_group()
    base.add_argument("--base", metavar="HASH", help="replace the document that has this hash")
    base.add_argument("--force", action="store_true", help="replace whatever is there")
    _add_client(push)
    push.set_defaults(run=("documents", "push"))

    _add_keyrings(commands.add_parser("keyring", help="manage who can open sealed data"))

    append = commands.add_parser("append", help="add an element to a log, with a proof of who wrote it")
    append.add_argument("log", metavar="KEY", help="its path after /push/")
    append.add_argument(
        "element", metavar="DATA", nargs="?", default="-", help="a JSON object (default: -, stdin)"
    )
    append.add_argument("--ts", metavar="MS", type=int, help="its time (default: the server's)")
    _add_client(append)
    append.set_defaults(run=("documents", "append"))

    tail = commands.add_parser("tail", help="print the newest elements of a log, one a line")
    tail.add_argument("log", metavar="KEY", help="its path after /pull/")
    tail.add_argument("-f", "--follow", action="store_true", help="go on with those that come")
    tail.add_argument(
        "--collection", metavar="NAME", help="with -f: the log's, to be told of its changes alone"
    )
    tail.add_argument("-n", metavar="N", type=int, help="so many (default: 10; with --since: all)")
    tail.add_argument("--since", metavar="MS", type=int, help="only elements after this time")
    tail.add_argument("--field", metavar="NAME", default="items", help="what the log calls its elements")
    _add_client(tail)
    tail.set_defaults(run=("documents", "tail"))

    watch = commands.add_parser(
        "watch",
        help="print what is written, as it is written, one change a line",
        description="Goes on until it is interrupted, across restarts of the server. A line "
        '{"reset": true, "id": ID} says that changes are lost: pull everything again.',
    )
    watch.add_argument("--collections", metavar="NAME[,NAME..]", help="of these (default: all you may read)")
    watch.add_argument(
        "--params", metavar="JSON", help='only documents with: {"NAME": {"PARAM": "VALUE", ...}, ...}'
    )
    watch.add_argument("--after", metavar="ID", help="go on after the line with this id")
    _add_client(watch)
    watch.set_defaults(run=("documents", "watch"))

    names = commands.add_parser("list", help="print what a collection holds, one name a line")
    names.add_argument(
        "prefix", metavar="KEY-PREFIX", nargs="?", default="", help="the path after /list/ (default: none)"
    )
    names.add_argument("--after", metavar="NAME", help="only names greater than this")
    _add_client(names)
    names.set_defaults(run=("documents", "list_names"))

    batch = commands.add_parser("batch", help="print documents of several collections, from one request")
    batch.add_argument("names", metavar="NAME[,NAME..]", help="the collections")
    batch.add_argument(
        "--params", metavar="JSON", help='path parameters: {"NAME": [{"PARAM": "VALUE"}, ...], ...}'
    )
    _add_client(batch)
    batch.set_defaults(run=("documents", "batch"))

    copy = commands.add_parser(
        "copy",
        help="copy everything in a store to another one; run it again to continue or to catch up",
        description="FROM and TO are file:DIR, s3://BUCKET/PREFIX (credentials from the environment) or a "
        "configuration file, whose store is meant. FROM may be folder:DIR, a folder of Starfish's.",
    )
    copy.add_argument("source", metavar="FROM")
    copy.add_argument("target", metavar="TO")
    copy.add_argument("--overwrite", action="store_true", help="replace what differs at TO")
    copy.add_argument(
        "--keep-corrupt", action="store_true", help="also copy corrupt objects, and report them"
    )
    copy.add_argument(
        "--quick",
        action="store_true",
        help="trust the recorded hashes of files that exist at TO, instead of reading these files",
    )
    copy.set_defaults(run=("admin", "copy"))

    verify = commands.add_parser(
        "verify",
        help="read everything in a store and list what is damaged; servers may run meanwhile",
        description="Compares every document, log, file and revocation list with its hash or checksum. "
        "Prints a line of JSON for each damaged object, then the number of objects and bytes read. From then "
        "on the server refuses to serve a damaged file until it is pushed or copied again. The exit status "
        "is 1 if anything is damaged.",
    )
    verify.add_argument("--config", metavar="FILE", help="the server's configuration")
    verify.add_argument(
        "--store", metavar="URL", help="file:DIR (default: file:./data) or s3://BUCKET/PREFIX"
    )
    verify.set_defaults(run=("admin", "verify"))

    project = commands.add_parser("project", help="work on the lists of projections")
    actions = project.add_subparsers(required=True, metavar="ACTION")
    rebuild = actions.add_parser(
        "rebuild",
        help="make the lists of a projection anew from their sources; servers may run meanwhile",
        description="Prints each list: its entries, and how many of them were missing, other or too many.",
    )
    rebuild.add_argument("name", metavar="NAME", help="its name, or its target")
    rebuild.add_argument("--config", metavar="FILE", required=True, help="the server's configuration")
    _add_storage_options(rebuild)
    rebuild.set_defaults(run=("admin", "rebuild_lists"))

    _add_events(commands.add_parser("events", help="work on the files of events"))

    _add_bench(commands.add_parser(
        "bench",
        help="load-test a server that has a manifest (configEndpoint)",
        description="Pushes new documents, then pulls some of them. For a log, appends elements and pulls "
        "the newest ones. The server's manifest says what a collection holds. Nothing is deleted afterwards: "
        "name collections that exist for this purpose.",
    ))  # fmt: skip
    return parser


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument(
        "collection",
        metavar="NAME[=KEY]",
        nargs="+",
        help="a collection and its key template (default: NAME/{id}); {identity}: your user id",
    )
    bench.add_argument("--action", choices=("push", "pull"), help="run only this one (default: both)")
    bench.add_argument("--seconds", type=float, default=3.0, help="duration of each run (default: 3)")
    bench.add_argument(
        "--count", type=int, default=20_000, help="maximum requests of each run (default: 20000)"
    )
    bench.add_argument("--connections", type=int, default=32, help="concurrent requests (default: 32)")
    bench.add_argument(
        "--bytes", type=int, default=1_024, help="size of each document or element (default: 1024)"
    )
    bench.add_argument("--json", action="store_true", help="print each run as a JSON object, one a line")
    _add_client(bench)
    bench.set_defaults(run=("bench", "bench"))


def _add_storage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", metavar="URL", help="file:DIR (default: file:./data), s3://BUCKET/PREFIX or memory:"
    )
    parser.add_argument(
        "--coordinator",
        metavar="URL",
        help="file:DIR, redis://HOST:PORT/NUMBER or memory: (default: the store's folder, else memory:)",
    )


def _add_events(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="ACTION")
    compact = commands.add_parser(
        "compact",
        help="merge small files into larger ones; servers may run meanwhile",
        description="Prints a line for each folder: how many files there were and are, how many rows were "
        "merged, how many files are too young yet, and which others were left, with the reason.",
    )
    compact.add_argument(
        "--older-than",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="only files at least so old (default: 0)",
    )
    compact.set_defaults(run=("admin", "compact"))
    sql = commands.add_parser(
        "sql",
        help="ask DuckDB about what was pushed, in the view `events`; rows are JSON, one a line",
        description="Opens DuckDB, where it is installed, on the files of the store.",
    )
    sql.add_argument("query", metavar="QUERY", nargs="?", help="default: from stdin")
    sql.set_defaults(run=("admin", "sql"))
    for command in (compact, sql):
        command.add_argument("--config", metavar="FILE", required=True, help="the server's configuration")
        command.add_argument("--store", metavar="URL", help="file:DIR or s3://BUCKET/PREFIX")
        command.add_argument(
            "--collection", metavar="NAME", help="of the events pushed to this one (default: all)"
        )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make keys: random, or those of a passphrase")
    new.add_argument("--passphrase-stdin", action="store_true", help="read a passphrase from stdin")
    new.add_argument("--out", metavar="FILE", help="write them here, for your eyes only (default: print)")
    new.set_defaults(run=("credentials", "new_key"))
    show = commands.add_parser("show", help="print the public halves, to give away")
    show.add_argument("file", metavar="FILE")
    show.set_defaults(run=("credentials", "show_key"))


def _add_caps(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    device = commands.add_parser("device", help="for a device of your own; without --to: for the key itself")
    device.add_argument("--to", metavar="FILE", help="the device's keys, as `keys show` prints them")
    device.add_argument(
        "--collection", action="append", metavar="NAME", help="gives cap:OP:NAME roles (default: *)"
    )
    device.set_defaults(run=("credentials", "device"))

    member = commands.add_parser("member", help="for another person, in one collection")
    member.add_argument("collection", metavar="COLLECTION")
    member.add_argument("--to", metavar="FILE", required=True, help="their keys, as `keys show` prints them")
    member.set_defaults(run=("credentials", "member"))

    audience = commands.add_parser("audience", help="for whoever presents it, in one collection")
    audience.add_argument("collection", metavar="COLLECTION")
    audience.add_argument("--aud", action="append", metavar="KEY", help="only for this key (64 hex digits)")
    audience.add_argument("--link", action="store_true", help="print the fragment of a public link")
    audience.set_defaults(run=("credentials", "audience"))

    for command in (member, audience):
        command.add_argument("--write", action="store_true", help="may write too (default: read and list)")
    for command in (device, member, audience):
        command.add_argument("--key", metavar="FILE", required=True, help="the issuer's key file")
        command.add_argument("--days", type=int, default=30, help="how long it lasts (default: 30)")
        command.add_argument(
            "--op", action="append", choices=("read", "list", "write"), help="may be repeated"
        )
        command.add_argument("--path", action="append", metavar="GLOB", help="may be repeated; !GLOB denies")
        command.add_argument("--out", metavar="FILE", help="write it here (default: print)")

    show = commands.add_parser("show", help="print a certificate and whether it holds")
    show.add_argument("file", metavar="FILE", help="JSON or an Authorization header; - is stdin")
    show.add_argument(
        "--server", metavar="URL", type=_url, help="ask this server whether the certificate is revoked"
    )
    show.set_defaults(run=("credentials", "show_certificate"))

    revoke = commands.add_parser(
        "revoke",
        help="revoke certificates and keys: print the signed revocation list; --publish sends it",
        description="Signs a revocation list and prints it. With --publish the list keeps the entries of "
        "the one that the server has, and replaces it.",
    )
    revoke.add_argument("file", metavar="FILE", nargs="*", help="certificates to revoke")
    revoke.add_argument(
        "--subject", metavar="FILE", action="append", default=[],
        help="revoke all certificates that the issuer gave to the key in FILE (as of `keys show`)",
    )  # fmt: skip
    revoke.add_argument("--key", metavar="FILE", required=True, help="the issuer's key file")
    revoke.add_argument(
        "--generation", metavar="N", type=int,
        help="number of the list, larger than that of the one it replaces (with --publish: the next)",
    )  # fmt: skip
    revoke.add_argument(
        "--replace",
        action="store_true",
        help="with --publish: drop the entries of the published list, so that they are valid again",
    )
    revoke.add_argument("--publish", action="store_true", help="send it to the server as well")
    _add_server(revoke)
    revoke.set_defaults(run=("credentials", "revoke"))


def _add_keyrings(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make one: for the key itself, and others")
    add = commands.add_parser("add", help="let somebody open what is sealed, also what was before")
    remove = commands.add_parser("remove", help="seal under a new key from now on, which somebody has not")
    show = commands.add_parser("show", help="print who is in it, and whether it opens")
    for command in (new, add, remove, show):
        command.add_argument("name", metavar="NAME", help="the path before /_keyring")
    new.add_argument("recipient", metavar="FILE", nargs="*", help="their keys, as `keys show` prints them")
    for command in (add, remove):
        command.add_argument("recipient", metavar="FILE", help="their keys, as `keys show` prints them")
    for command in (new, add, remove, show):
        _add_trust(command)
        _add_client(command)
    new.set_defaults(run=("keyrings", "new_keyring"))
    add.set_defaults(run=("keyrings", "add_recipient"))
    remove.set_defaults(run=("keyrings", "remove_recipient"))
    show.set_defaults(run=("keyrings", "show_keyring"))


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        metavar="FILE",
        action="append",
        default=[],
        help="keys of who else may add to the keyring, as `keys show` prints them; may be repeated",
    )
    parser.add_argument(
        "--min-epoch",
        metavar="N",
        type=int,
        default=1,
        help="refuse the keyring if it is older: the latest epoch you saw",
    )


def _add_client(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("--key", metavar="FILE", help="sign with these keys")
    parser.add_argument("--cap", metavar="FILE", help="under this certificate (default: the key's own)")
    parser.add_argument(
        "--namespace", metavar="NAME", help="collections under /v1/NAME: the mount path must be /v1, or none"
    )
    parser.add_argument("--admin-token", metavar="TOKEN", help="default: $PYSYNC_ADMIN_TOKEN")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        metavar="URL",
        type=_url,
        default=os.environ.get("PYSYNC_URL", DEFAULT_URL),
        help="default: $PYSYNC_URL or " + DEFAULT_URL,
    )


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}: begin it with http:// or https://")
    return text
