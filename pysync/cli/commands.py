"""The commands of `pysync`: their arguments, help and examples."""

import argparse

from pysync import __version__
from pysync.cli.parser import (
    EXIT_CODES,
    Parser,
    PrintSchema,
    add_client,
    add_config,
    add_issuer,
    add_server,
    add_storage_options,
    add_trust,
    default_config,
    server_url,
)


def build_parser() -> Parser:
    """Return the parser of the whole command line. `run` of its result is a command's module and function."""
    parser = Parser(
        prog="pysync",
        description="Keep documents in sync: the server, and a client for people and scripts.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"pysync {__version__}")
    commands = parser.add_commands()

    serve = commands.add_parser(
        "serve",
        help="run the server",
        example="pysync serve --config pysync.json --port 8080",
    )
    add_config(serve)
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", help="port to listen on (default: 8080)")
    add_storage_options(serve)
    serve.add_argument("--workers", metavar="N", help="number of processes that serve (default: 1)")
    serve.runs("serve", "serve")

    check = commands.add_parser(
        "check",
        help="validate a configuration and print its routes",
        example="pysync check pysync.json --strict\npysync check pysync.json --probe\n"
        "pysync check --json-schema > pysync.schema.json",
    )
    default = default_config()
    check.add_argument(
        "file",
        metavar="FILE",
        nargs="?" if default else None,
        default=default,
        help="the configuration (default: $PYSYNC_CONFIG, else ./pysync.json)",
    )
    check.add_argument(
        "--probe", action="store_true", help="also open the store and the coordinator, and test them"
    )
    check.add_argument("--strict", action="store_true", help="exit with status 1 if there are warnings")
    check.add_argument(
        "--json-schema",
        action=PrintSchema,
        nargs=0,
        help="print the JSON Schema of the configuration, for editors, and exit",
    )
    check.runs("serve", "check")

    _add_keys(commands.add_parser("keys", help="create and show keys"))
    _add_certificates(commands.add_parser("cap", help="issue, show and revoke certificates"))
    _add_documents(commands)
    _add_keyrings(commands.add_parser("keyring", help="manage who can read sealed data"))
    _add_logs(commands)
    _add_stores(commands)
    _add_events(commands.add_parser("events", help="compact and query the files of events"))
    _add_bench(commands)
    return parser


def _add_documents(commands: "argparse._SubParsersAction[Parser]") -> None:
    pull = commands.add_parser(
        "pull",
        help="print a document, or download a file with --out",
        example="pysync pull notes/n1 --data\npysync pull photos/p1 --out p1.png",
    )
    pull.add_argument("document", metavar="KEY", help="path after /pull/")
    pull.add_argument("--data", action="store_true", help="print only the document's data")
    pull.add_argument("--fail", action="store_true", help="exit with status 6 if there is no such document")
    pull.add_argument(
        "--out", metavar="FILE", help="download the file at KEY to this path (- for standard output)"
    )
    pull.add_argument("--open", metavar="NAME", help="with --out: decrypt the file with this keyring")
    add_trust(pull)
    add_client(pull)
    pull.runs("documents", "pull")

    push = commands.add_parser(
        "push",
        help="create or replace a document, or upload a file with --type",
        description="Creates a document, unless --base or --force says that it replaces one.",
        example='echo \'{"title": "Milk"}\' | pysync push notes/n1\n'
        "pysync push photos/p1 p1.png --type image/png",
    )
    push.add_argument("document", metavar="KEY", help="path after /push/")
    push.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default="-",
        help="a JSON object, or any file (default: -, standard input)",
    )
    push.add_argument(
        "--type", metavar="TYPE", help="store FILE as a binary file of this media type, for example image/png"
    )
    push.add_argument(
        "--seal", metavar="NAME", help="store FILE encrypted for the recipients of this keyring"
    )
    add_trust(push)
    base = push.add_mutually_exclusive_group()
    base.add_argument("--base", metavar="HASH", help="replace the document that has this hash")
    base.add_argument("--force", action="store_true", help="replace whatever is stored")
    add_client(push)
    push.runs("documents", "push")

    names = commands.add_parser(
        "list",
        help="print the names in a collection, one a line",
        example="pysync list notes",
    )
    names.add_argument(
        "prefix", metavar="KEY-PREFIX", nargs="?", default="", help="path after /list/ (default: empty)"
    )
    names.add_argument("--after", metavar="NAME", help="print only names greater than this one")
    add_client(names)
    names.runs("documents", "list_names")

    batch = commands.add_parser(
        "batch",
        help="print documents of several collections, read with one request",
        example='pysync batch notes,tasks --params \'{"notes": [{"id": "n1"}, {"id": "n2"}]}\'',
    )
    batch.add_argument("names", metavar="NAME[,NAME..]", help="the collections")
    batch.add_argument(
        "--params", metavar="JSON", help='path parameters: {"NAME": [{"PARAM": "VALUE"}, ...], ...}'
    )
    add_client(batch)
    batch.runs("documents", "batch")


def _add_logs(commands: "argparse._SubParsersAction[Parser]") -> None:
    append = commands.add_parser(
        "append",
        help="append an element to a log, with a proof of its author if there is a key",
        example='pysync append chat/room1 \'{"text": "hello"}\' --key me.json',
    )
    append.add_argument("log", metavar="KEY", help="path after /push/")
    append.add_argument(
        "element", metavar="DATA", nargs="?", default="-", help="a JSON object (default: -, standard input)"
    )
    append.add_argument("--ts", metavar="MS", type=int, help="its timestamp in ms (default: the server's)")
    add_client(append)
    append.runs("documents", "append")

    tail = commands.add_parser(
        "tail",
        help="print the newest elements of a log, one a line",
        example="pysync tail chat/room1 -n 20\npysync tail -f chat/room1 --key me.json",
    )
    tail.add_argument("log", metavar="KEY", help="path after /pull/")
    tail.add_argument("-f", "--follow", action="store_true", help="keep printing new elements")
    tail.add_argument(
        "--collection", metavar="NAME", help="with -f: the log's collection, to subscribe to it alone"
    )
    tail.add_argument("-n", metavar="N", type=int, help="number of elements (default: 10; with --since: all)")
    tail.add_argument("--since", metavar="MS", type=int, help="print only elements after this timestamp")
    tail.add_argument(
        "--field", metavar="NAME", default="items", help="name of the array that holds the log's elements"
    )
    add_client(tail)
    tail.runs("documents", "tail")

    watch = commands.add_parser(
        "watch",
        help="print changes as they happen, one a line",
        description="Runs until it is interrupted, and reconnects when the server restarts. A line "
        '{"reset": true, "id": ID} says that changes were lost: pull everything again.',
        example='pysync watch --collections notes --params \'{"notes": {"id": "n1"}}\'',
    )
    watch.add_argument(
        "--collections", metavar="NAME[,NAME..]", help="collections (default: all that you may read)"
    )
    watch.add_argument(
        "--params", metavar="JSON", help='only documents with: {"NAME": {"PARAM": "VALUE", ...}, ...}'
    )
    watch.add_argument("--after", metavar="ID", help="resume after the change with this id")
    add_client(watch)
    watch.runs("documents", "watch")


def _add_stores(commands: "argparse._SubParsersAction[Parser]") -> None:
    copy = commands.add_parser(
        "copy",
        help="copy everything in a store to another one; run it again to continue or to catch up",
        description="FROM and TO are file:DIR, s3://BUCKET/PREFIX (credentials from the environment) or a "
        "configuration file, whose store is used. FROM may be folder:DIR, the folder of a Starfish server.",
        example="pysync copy file:./data s3://my-bucket/pysync",
    )
    copy.add_argument("source", metavar="FROM", help="the store to read")
    copy.add_argument("target", metavar="TO", help="the store to write")
    copy.add_argument("--overwrite", action="store_true", help="replace objects that differ at TO")
    copy.add_argument(
        "--keep-corrupt", action="store_true", help="also copy corrupt objects, and report them"
    )
    copy.add_argument(
        "--quick",
        action="store_true",
        help="trust the recorded hashes of files that exist at TO, instead of reading these files",
    )
    copy.runs("admin", "copy")

    verify = commands.add_parser(
        "verify",
        help="read everything in a store and list what is damaged; servers may run meanwhile",
        description="Compares every document, log, file and revocation list with its hash or checksum. "
        "Prints a line of JSON for each damaged object, then the number of objects and bytes read. From then "
        "on the server refuses to serve a damaged file until it is pushed or copied again. The exit status "
        "is 1 if anything is damaged.",
        example="pysync verify --store file:./data",
    )
    add_config(verify)
    verify.add_argument(
        "--store", metavar="URL", help="file:DIR (default: file:./data) or s3://BUCKET/PREFIX"
    )
    verify.runs("admin", "verify")

    project = commands.add_parser("project", help="maintain the lists of projections")
    rebuild = project.add_commands().add_parser(
        "rebuild",
        help="rebuild the lists of a projection from their sources; servers may run meanwhile",
        description="Prints each list: its entries, and how many were missing, different or superfluous.",
        example="pysync project rebuild titles --config pysync.json",
    )
    rebuild.add_argument("name", metavar="NAME", help="name or target of the projection")
    add_config(rebuild, required=True)
    add_storage_options(rebuild)
    rebuild.runs("admin", "rebuild_lists")


def _add_events(events: Parser) -> None:
    actions = events.add_commands()
    compact = actions.add_parser(
        "compact",
        help="merge small files into larger ones; servers may run meanwhile",
        description="Prints a line for each folder: the number of files before and after, the number of "
        "merged rows, of files that are too recent, and of files that were skipped, with the reason.",
        example="pysync events compact --older-than 3600",
    )
    compact.add_argument(
        "--older-than",
        metavar="SECONDS",
        type=float,
        default=0.0,
        help="merge only files of at least this age (default: 0)",
    )
    compact.runs("admin", "compact")
    sql = actions.add_parser(
        "sql",
        help="query the events with DuckDB, in the view `events`; rows are JSON, one a line",
        description="Opens DuckDB, which must be installed, on the files of the store.",
        example="pysync events sql 'SELECT count(*) AS n FROM events'",
    )
    sql.add_argument("query", metavar="QUERY", nargs="?", help="the query (default: from standard input)")
    sql.runs("admin", "sql")
    for command in (compact, sql):
        add_config(command, required=True)
        command.add_argument("--store", metavar="URL", help="file:DIR or s3://BUCKET/PREFIX")
        command.add_argument(
            "--collection", metavar="NAME", help="only events pushed to this collection (default: all)"
        )


def _add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="load-test a server that has a manifest (configEndpoint)",
        description="Pushes new documents, then pulls some of them. For a log, appends elements and pulls "
        "the newest ones. The server's manifest says what a collection holds. Nothing is deleted afterwards: "
        "name collections that exist for this purpose.",
        example="pysync bench scratch --seconds 5",
    )
    bench.add_argument(
        "collection",
        metavar="NAME[=KEY]",
        nargs="+",
        help="a collection and its key template (default: NAME/{id}); {identity}: your user id",
    )
    bench.add_argument("--action", choices=("push", "pull"), help="run only this one (default: both)")
    for option, kind, default, text in (
        ("--seconds", float, 3.0, "duration of each run (default: 3)"),
        ("--count", int, 20_000, "maximum requests of each run (default: 20000)"),
        ("--connections", int, 32, "concurrent requests (default: 32)"),
        ("--bytes", int, 1_024, "size of each document or element (default: 1024)"),
    ):
        bench.add_argument(option, type=kind, default=default, help=text)
    bench.add_argument("--json", action="store_true", help="print each run as a JSON object, one a line")
    add_client(bench)
    bench.runs("bench", "bench")


def _add_keys(keys: Parser) -> None:
    commands = keys.add_commands()
    new = commands.add_parser(
        "new",
        help="create keys, at random or from a passphrase",
        example="pysync keys new --out me.json",
    )
    new.add_argument("--passphrase-stdin", action="store_true", help="read a passphrase from standard input")
    new.add_argument(
        "--out", metavar="FILE", help="write the keys to this file, readable by you alone (default: print)"
    )
    new.runs("credentials", "new_key")
    show = commands.add_parser(
        "show",
        help="print the public keys, which you may give to others",
        example="pysync keys show me.json > me.pub",
    )
    show.add_argument("file", metavar="FILE", help="a key file")
    show.runs("credentials", "show_key")


def _add_certificates(certificates: Parser) -> None:
    commands = certificates.add_commands()
    device = commands.add_parser(
        "device",
        help="issue a certificate for another device of yours; without --to: for the key itself",
        example="pysync cap device --key me.json --to laptop.pub --out laptop.cap",
    )
    device.add_argument("--to", metavar="FILE", help="the device's keys, as `keys show` prints them")
    device.add_argument(
        "--collection", action="append", metavar="NAME", help="grant cap:OP:NAME roles (default: *)"
    )
    device.runs("credentials", "device")

    member = commands.add_parser(
        "member",
        help="issue a certificate for another person, for one collection",
        example="pysync cap member notes --key me.json --to bob.pub --write --out bob.cap",
    )
    member.add_argument("collection", metavar="COLLECTION", help="name of the collection")
    member.add_argument("--to", metavar="FILE", required=True, help="their keys, as `keys show` prints them")
    member.runs("credentials", "member")

    audience = commands.add_parser(
        "audience",
        help="issue a certificate for anyone who presents it, for one collection",
        example="pysync cap audience notes --key me.json --link",
    )
    audience.add_argument("collection", metavar="COLLECTION", help="name of the collection")
    audience.add_argument("--aud", action="append", metavar="KEY", help="only for this key (64 hex digits)")
    audience.add_argument("--link", action="store_true", help="print the fragment of a public link")
    audience.runs("credentials", "audience")

    for command in (member, audience):
        command.add_argument("--write", action="store_true", help="also allow writes (default: read, list)")
    for command in (device, member, audience):
        add_issuer(command)
        command.add_argument("--days", type=int, default=30, help="days until it expires (default: 30)")
        command.add_argument(
            "--op", action="append", choices=("read", "list", "write"), help="allowed operation; repeatable"
        )
        command.add_argument(
            "--path", action="append", metavar="GLOB", help="allowed paths; !GLOB denies; repeatable"
        )
        command.add_argument("--out", metavar="FILE", help="write the certificate here (default: print)")

    show = commands.add_parser(
        "show",
        help="print a certificate and whether it is valid",
        example="pysync cap show bob.cap --server https://sync.example.com",
    )
    show.add_argument("file", metavar="FILE", help="JSON or an Authorization header; - is standard input")
    show.add_argument(
        "--server", metavar="URL", type=server_url, help="ask this server whether the certificate is revoked"
    )
    show.runs("credentials", "show_certificate")

    revoke = commands.add_parser(
        "revoke",
        help="revoke certificates and keys: print the signed revocation list; --publish sends it",
        description="Signs a revocation list and prints it. With --publish the list keeps the entries of "
        "the one that the server has, and replaces it.",
        example="pysync cap revoke bob.cap --key me.json --publish",
    )
    revoke.add_argument("file", metavar="FILE", nargs="*", help="certificates to revoke")
    revoke.add_argument(
        "--subject", metavar="FILE", action="append", default=[],
        help="revoke all certificates that the issuer gave to the key in FILE (as of `keys show`)",
    )  # fmt: skip
    add_issuer(revoke)
    revoke.add_argument(
        "--generation", metavar="N", type=int,
        help="number of the list, larger than that of the one it replaces (with --publish: the next)",
    )  # fmt: skip
    revoke.add_argument(
        "--replace",
        action="store_true",
        help="with --publish: drop the entries of the published list, so that they are valid again",
    )
    revoke.add_argument("--publish", action="store_true", help="also send the list to the server")
    add_server(revoke)
    revoke.runs("credentials", "revoke")


def _add_keyrings(keyrings: Parser) -> None:
    commands = keyrings.add_commands()
    for action, help_text, recipients, example in (
        ("new", "create a keyring for your key and others", "*", "teams/t1 bob.pub"),
        ("add", "let someone read sealed data, also what was sealed before", 1, "teams/t1 carol.pub"),
        ("remove", "remove someone: later data is sealed under a new key", 1, "teams/t1 bob.pub"),
        ("show", "print the recipients of a keyring, and whether you can open it", None, "teams/t1"),
    ):
        command = commands.add_parser(
            action, help=help_text, example=f"pysync keyring {action} {example} --key me.json"
        )
        command.set_defaults(action=action, recipient=[])
        command.add_argument("name", metavar="NAME", help="path before /_keyring")
        if recipients is not None:
            command.add_argument(
                "recipient", metavar="FILE", nargs=recipients, help="their keys, as `keys show` prints them"
            )
        add_trust(command)
        add_client(command)
        command.runs("credentials", "keyring")
