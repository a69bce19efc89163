"""The commands of `pysync`: their arguments, help and examples."""

from pysync import __version__
from pysync.cli.backup_commands import add_backup
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
    _add_server(parser)
    _add_keys(parser.add_command("keys", "create and show keys"))
    _add_certificates(parser.add_command("cap", "issue, show and revoke certificates"))
    _add_documents(parser)
    _add_keyrings(parser.add_command("keyring", "manage who can read sealed data"))
    _add_logs(parser)
    _add_usage(parser)
    _add_stores(parser)
    add_backup(parser)
    _add_events(parser.add_command("events", "compact and query the files of events"))
    _add_bench(parser)
    return parser


def _add_server(parser: Parser) -> None:
    serve = parser.add_command(
        "serve", "run the server", "serve.serve", example="pysync serve --config pysync.json --port 8080"
    )
    add_config(serve)
    serve.add_value("--host", "HOST", "address to listen on (default: 127.0.0.1)")
    serve.add_value("--port", "PORT", "port to listen on (default: 8080)")
    serve.add_value("--admin-host", "HOST", "address of the operators' listener (default: 127.0.0.1)")
    serve.add_value("--admin-port", "PORT", "port of the operators' listener (default: there is none)")
    add_storage_options(serve)
    serve.add_value("--workers", "N", "number of processes that serve (default: 1)")

    check = parser.add_command(
        "check",
        "validate a configuration and print its routes",
        "serve.check",
        example="pysync check pysync.json --strict\npysync check pysync.json --probe\n"
        "pysync check --json-schema > pysync.schema.json",
    )
    check.add_value(
        "file",
        "FILE",
        "the configuration (default: $PYSYNC_CONFIG, else ./pysync.json)",
        nargs="?",
        default=default_config(),
    )
    check.add_flag("--probe", "also open the store and the coordinator, and test them")
    check.add_flag("--strict", "exit with status 1 if there are warnings")
    check.add_argument(
        "--json-schema",
        action=PrintSchema,
        nargs=0,
        help="print the JSON Schema of the configuration, for editors, and exit",
    )


def _add_documents(parser: Parser) -> None:
    pull = parser.add_command(
        "pull",
        "print a document, or download a file with --out",
        "documents.pull",
        example="pysync pull notes/n1 --data\npysync pull photos/p1 --out p1.png",
    )
    pull.add_value("document", "KEY", "path after /pull/")
    pull.add_flag("--data", "print only the document's data")
    pull.add_value("--version", "HASH", "print this version, which the history of the document has")
    pull.add_flag("--fail", "exit with status 6 if there is no such document or version")
    pull.add_value("--out", "FILE", "download the file at KEY to this path (- for standard output)")
    pull.add_value("--open", "NAME", "with --out: decrypt the file with this keyring")
    add_trust(pull)
    add_client(pull)

    push = parser.add_command(
        "push",
        "create or replace a document, or upload a file with --type",
        "documents.push",
        description="Creates a document, unless --base or --force says that it replaces one.",
        example='echo \'{"title": "Milk"}\' | pysync push notes/n1\n'
        "pysync push photos/p1 p1.png --type image/png",
    )
    push.add_value("document", "KEY", "path after /push/")
    push.add_value(
        "file", "FILE", "a JSON object, or any file (default: -, standard input)", nargs="?", default="-"
    )
    push.add_value("--type", "TYPE", "store FILE as a binary file of this media type, for example image/png")
    push.add_value("--seal", "NAME", "store FILE encrypted for the recipients of this keyring")
    add_trust(push)
    base = push.add_mutually_exclusive_group()
    base.add_argument("--base", metavar="HASH", help="replace the document that has this hash")
    base.add_argument("--force", action="store_true", help="replace whatever is stored")
    add_client(push)

    history = parser.add_command(
        "history",
        "print the versions of a document that the server keeps, the newest first",
        "documents.history",
        example="pysync history notes/n1",
    )
    history.add_value("document", "KEY", "path after /history/")
    add_client(history)

    delete = parser.add_command(
        "delete",
        "delete a document, a file or a log",
        "documents.delete",
        description='The collection must have `"deletable": true`.',
        example="pysync delete notes/n1 --force",
    )
    delete.add_value("document", "KEY", "path after /push/")
    base = delete.add_mutually_exclusive_group(required=True)
    base.add_argument("--base", metavar="HASH", help="delete it if it has this hash")
    base.add_argument("--force", action="store_true", help="delete whatever is stored")
    add_client(delete)

    names = parser.add_command(
        "list",
        "print the names in a collection, one a line",
        "documents.list_names",
        example="pysync list notes",
    )
    names.add_value("prefix", "KEY-PREFIX", "path after /list/ (default: empty)", nargs="?", default="")
    names.add_value("--after", "NAME", "print only names greater than this one")
    add_client(names)

    batch = parser.add_command(
        "batch",
        "print documents of several collections, read with one request",
        "documents.batch",
        example='pysync batch notes,tasks --params \'{"notes": [{"id": "n1"}, {"id": "n2"}]}\'',
    )
    batch.add_value("names", "NAME[,NAME..]", "the collections")
    batch.add_value("--params", "JSON", 'path parameters: {"NAME": [{"PARAM": "VALUE"}, ...], ...}')
    add_client(batch)


def _add_logs(parser: Parser) -> None:
    append = parser.add_command(
        "append",
        "append an element to a log, with a proof of its author if there is a key",
        "documents.append",
        example='pysync append chat/room1 \'{"text": "hello"}\' --key me.json',
    )
    append.add_value("log", "KEY", "path after /push/")
    append.add_value("element", "DATA", "a JSON object (default: -, standard input)", nargs="?", default="-")
    append.add_value("--ts", "MS", "its timestamp in ms (default: the server's)", type=int)
    add_client(append)

    tail = parser.add_command(
        "tail",
        "print the newest elements of a log, one a line",
        "documents.tail",
        example="pysync tail chat/room1 -n 20\npysync tail -f chat/room1 --key me.json",
    )
    tail.add_value("log", "KEY", "path after /pull/")
    tail.add_argument("-f", "--follow", action="store_true", help="keep printing new elements")
    tail.add_value("--collection", "NAME", "with -f: the log's collection, to subscribe to it alone")
    tail.add_value("-n", "N", "number of elements (default: 10; with --since: all)", type=int)
    tail.add_value("--since", "MS", "print only elements after this timestamp", type=int)
    tail.add_value("--field", "NAME", "name of the array that holds the log's elements", default="items")
    add_client(tail)

    watch = parser.add_command(
        "watch",
        "print changes as they happen, one a line",
        "documents.watch",
        description="Runs until it is interrupted, and reconnects when the server restarts. A line "
        '{"reset": true, "id": ID} says that changes were lost: pull everything again.',
        example='pysync watch --collections notes --params \'{"notes": {"id": "n1"}}\'',
    )
    watch.add_value("--collections", "NAME[,NAME..]", "collections (default: all that you may read)")
    watch.add_value("--params", "JSON", 'only documents with: {"NAME": {"PARAM": "VALUE", ...}, ...}')
    watch.add_value("--after", "ID", "resume after the change with this id")
    add_client(watch)


def _add_usage(parser: Parser) -> None:
    usage = parser.add_command(
        "usage",
        "print what you use of your quotas, and what you may",
        "documents.usage",
        example="pysync usage --key me.json --space club",
    )
    usage.add_argument(
        "--space",
        metavar="NAME",
        action="append",
        default=[],
        help="also what this space uses, to which you belong; repeatable",
    )
    add_client(usage)

    stats = parser.add_command(
        "stats",
        "print what uses space in a store, with the largest documents; servers may run meanwhile",
        "stats.stats",
        description="Lists all objects of the store, which takes a while if there are many. With a "
        "configuration the result is by collection, and otherwise by the first segment of keys. `other` is "
        "what belongs to no collection, and `_pysync` the server's own.",
        example="pysync stats --config pysync.json -n 20\npysync stats --store file:./data",
    )
    add_config(stats)
    stats.add_value("--store", "URL", "file:DIR or s3://BUCKET/PREFIX, in place of the configuration's")
    stats.add_value("-n", "N", "number of the largest objects to print (default: 10)", type=int, default=10)

    get = parser.add_command(
        "get",
        "print one document, log or file from the store, without a server",
        "stats.get",
        description="Reads the store that the configuration names; servers may run meanwhile. Prints a "
        "document with its hash and time, the elements of a log, one a line, and a file as it is. "
        "The exit status is 6 if nothing is stored.",
        example="pysync get --config pysync.json notes/n1",
    )
    get.add_value("key", "KEY", "the key: path after /pull/")
    add_config(get)
    get.add_value("--store", "URL", "file:DIR or s3://BUCKET/PREFIX, in place of the configuration's")


def _add_stores(parser: Parser) -> None:
    copy = parser.add_command(
        "copy",
        "copy everything in a store to another one; run it again to continue or to catch up",
        "admin.copy",
        description="FROM and TO are file:DIR, s3://BUCKET/PREFIX (credentials from the environment) or a "
        "configuration file, whose store is used. FROM may be folder:DIR, the folder of a Starfish server.",
        example="pysync copy file:./data s3://my-bucket/pysync",
    )
    copy.add_value("source", "FROM", "the store to read")
    copy.add_value("target", "TO", "the store to write")
    copy.add_flag("--overwrite", "replace objects that differ at TO")
    copy.add_flag("--keep-corrupt", "also copy corrupt objects, and report them")
    copy.add_flag(
        "--quick", "trust the recorded hashes of files that exist at TO, instead of reading these files"
    )

    verify = parser.add_command(
        "verify",
        "read everything in a store and list what is damaged; servers may run meanwhile",
        "admin.verify",
        description="Compares every document, log, file and revocation list with its hash or checksum. "
        "Prints a line of JSON for each damaged object, then the number of objects and bytes read. From then "
        "on the server refuses to serve a damaged file until it is pushed or copied again. The exit status "
        "is 1 if anything is damaged.",
        example="pysync verify --store file:./data\n"
        "pysync verify --store file:./data --repair-from file:./backup",
    )
    add_config(verify)
    verify.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    verify.add_value(
        "--repair-from", "URL", "a backup of this store: replace what is damaged by the same version from it"
    )
    verify.add_value("--key", "FILE", "with --repair-from: the key of an encrypted backup")

    gc = parser.add_command(
        "gc",
        "delete what crashes and interrupted requests left in a store; servers may run meanwhile",
        "gc.collect",
        description="Deletes segments that no log leads to, chunks of logs that pysync took over from "
        "Starfish, temporary files, interrupted uploads and merges; without --store, also earlier versions "
        "of documents whose collection keeps none any more. Prints a line of JSON for each, then the "
        "number of each kind, and the bytes as far as they are known. Do not run it while a copy or a "
        "restore writes to the store. The exit status is 1 if a damaged object, which may lead to segments, "
        "kept it from deleting any.",
        example="pysync gc --store file:./data --dry-run",
    )
    add_config(gc)
    gc.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    gc.add_flag("--dry-run", "print what would be deleted, and delete nothing")
    gc.add_value(
        "--older-than",
        "SECONDS",
        "keep what is younger (default: 3600; minimum: 1800)",
        type=int,
        default=3600,
    )

    erase = parser.add_command(
        "erase",
        "erase a document, a folder or a person, with every trace; servers may run meanwhile",
        "erase.erase",
        description="Prints a report: what was erased, by kind, and what was not touched. Killed at any "
        "point, it is finished when it is run again, or when a server starts.",
        example="pysync erase --identity 5d41402abc4b2a76b9719d911017c592 --dry-run\n"
        "pysync erase --key users/5d41402abc4b2a76b9719d911017c592/profile",
    )
    what = erase.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="KEY", help="the document, log or file at this key")
    what.add_argument("--prefix", metavar="PREFIX", help="everything at this key and below it")
    what.add_argument(
        "--identity", metavar="ID", help="everything whose key has this user id in place of {identity}"
    )
    erase.add_value(
        "--kem-key",
        "KEY",
        "X25519 public key of that person, whose entries leave the keyrings of others; repeatable",
        action="append",
        default=[],
    )
    erase.add_flag("--dry-run", "only report what would be erased")
    add_config(erase, required=True)
    add_storage_options(erase)

    project = parser.add_command("project", "maintain the lists of projections")
    rebuild = project.add_command(
        "rebuild",
        "rebuild the lists of a projection from their sources; servers may run meanwhile",
        "admin.rebuild_lists",
        description="Prints each list: its entries, and how many were missing, different or superfluous.",
        example="pysync project rebuild titles --config pysync.json",
    )
    rebuild.add_value("name", "NAME", "name or target of the projection")
    add_config(rebuild, required=True)
    add_storage_options(rebuild)


def _add_events(events: Parser) -> None:
    compact = events.add_command(
        "compact",
        "merge small files into larger ones; servers may run meanwhile",
        "admin.compact",
        description="Prints a line for each folder: the number of files before and after, the number of "
        "merged rows, of files that are too recent, and of files that were skipped, with the reason.",
        example="pysync events compact --older-than 3600",
    )
    compact.add_value(
        "--older-than",
        "SECONDS",
        "merge only files of at least this age (default: 0)",
        type=float,
        default=0.0,
    )
    sql = events.add_command(
        "sql",
        "query the events with DuckDB, in the view `events`; rows are JSON, one a line",
        "admin.sql",
        description="Opens DuckDB, which must be installed, on the files of the store.",
        example="pysync events sql 'SELECT count(*) AS n FROM events'",
    )
    sql.add_value("query", "QUERY", "the query (default: from standard input)", nargs="?")
    for command in (compact, sql):
        add_config(command, required=True)
        command.add_value("--store", "URL", "file:DIR or s3://BUCKET/PREFIX")
        command.add_value("--collection", "NAME", "only events pushed to this collection (default: all)")


def _add_bench(parser: Parser) -> None:
    bench = parser.add_command(
        "bench",
        "load-test a server that has a manifest (configEndpoint)",
        "bench.bench",
        description="Pushes new documents, then pulls some of them. For a log, appends elements and pulls "
        "the newest ones. The server's manifest says what a collection holds. Nothing is deleted afterwards: "
        "name collections that exist for this purpose.",
        example="pysync bench scratch --seconds 5",
    )
    bench.add_value(
        "collection",
        "NAME[=KEY]",
        "a collection and its key template (default: NAME/{id}); {identity}: your user id",
        nargs="+",
    )
    bench.add_argument("--action", choices=("push", "pull"), help="run only this one (default: both)")
    for option, kind, default, text in (
        ("--seconds", float, 3.0, "duration of each run (default: 3)"),
        ("--count", int, 20_000, "maximum requests of each run (default: 20000)"),
        ("--connections", int, 32, "concurrent requests (default: 32)"),
        ("--bytes", int, 1_024, "size of each document or element (default: 1024)"),
    ):
        bench.add_argument(option, type=kind, default=default, help=text)
    bench.add_flag("--json", "print each run as a JSON object, one a line")
    add_client(bench)


def _add_keys(keys: Parser) -> None:
    new = keys.add_command(
        "new",
        "create keys, at random or from a passphrase",
        "credentials.new_key",
        example="pysync keys new --out me.json",
    )
    new.add_flag("--passphrase-stdin", "read a passphrase from standard input")
    new.add_value("--out", "FILE", "write the keys to this file, readable by you alone (default: print)")
    show = keys.add_command(
        "show",
        "print the public keys, which you may give to others",
        "credentials.show_key",
        example="pysync keys show me.json > me.pub",
    )
    show.add_value("file", "FILE", "a key file")


def _add_certificates(certificates: Parser) -> None:
    device = certificates.add_command(
        "device",
        "issue a certificate for another device of yours; without --to: for the key itself",
        "credentials.device",
        example="pysync cap device --key me.json --to laptop.pub --out laptop.cap",
    )
    device.add_value("--to", "FILE", "the device's keys, as `keys show` prints them")
    device.add_value("--collection", "NAME", "grant cap:OP:NAME roles (default: *)", action="append")

    member = certificates.add_command(
        "member",
        "issue a certificate for another person, for one collection",
        "credentials.member",
        example="pysync cap member notes --key me.json --to bob.pub --write --out bob.cap",
    )
    member.add_value("collection", "COLLECTION", "name of the collection")
    member.add_value("--to", "FILE", "their keys, as `keys show` prints them", required=True)

    audience = certificates.add_command(
        "audience",
        "issue a certificate for anyone who presents it, for one collection",
        "credentials.audience",
        example="pysync cap audience notes --key me.json --link",
    )
    audience.add_value("collection", "COLLECTION", "name of the collection")
    audience.add_value("--aud", "KEY", "only for this key (64 hex digits)", action="append")
    audience.add_flag("--link", "print the fragment of a public link")

    for command in (member, audience):
        command.add_flag("--write", "also allow writes (default: read, list)")
    for command in (device, member, audience):
        add_issuer(command)
        command.add_argument("--days", type=int, default=30, help="days until it expires (default: 30)")
        command.add_argument(
            "--op", action="append", choices=("read", "list", "write"), help="allowed operation; repeatable"
        )
        command.add_value("--path", "GLOB", "allowed paths; !GLOB denies; repeatable", action="append")
        command.add_value("--out", "FILE", "write the certificate here (default: print)")

    show = certificates.add_command(
        "show",
        "print a certificate and whether it is valid",
        "credentials.show_certificate",
        example="pysync cap show bob.cap --server https://sync.example.com",
    )
    show.add_value("file", "FILE", "JSON or an Authorization header; - is standard input")
    show.add_value("--server", "URL", "ask this server whether the certificate is revoked", type=server_url)

    revoke = certificates.add_command(
        "revoke",
        "revoke certificates and keys: print the signed revocation list; --publish sends it",
        "credentials.revoke",
        description="Signs a revocation list and prints it. With --publish the list keeps the entries of "
        "the one that the server has, and replaces it.",
        example="pysync cap revoke bob.cap --key me.json --publish",
    )
    revoke.add_value("file", "FILE", "certificates to revoke", nargs="*")
    revoke.add_value(
        "--subject",
        "FILE",
        "revoke all certificates that the issuer gave to the key in FILE (as of `keys show`)",
        action="append",
        default=[],
    )
    add_issuer(revoke)
    revoke.add_value(
        "--generation",
        "N",
        "number of the list, larger than that of the one it replaces (with --publish: the next)",
        type=int,
    )
    revoke.add_flag(
        "--replace", "with --publish: drop the entries of the published list, so that they are valid again"
    )
    revoke.add_flag("--publish", "also send the list to the server")
    add_server(revoke)


def _add_keyrings(keyrings: Parser) -> None:
    for action, help_text, recipients, example in (
        ("new", "create a keyring for your key and others", "*", "teams/t1 bob.pub"),
        ("add", "let someone read sealed data, also what was sealed before", 1, "teams/t1 carol.pub"),
        ("remove", "remove someone: later data is sealed under a new key", 1, "teams/t1 bob.pub"),
        ("show", "print the recipients of a keyring, and whether you can open it", None, "teams/t1"),
    ):
        command = keyrings.add_command(
            action,
            help_text,
            "credentials.keyring",
            example=f"pysync keyring {action} {example} --key me.json",
        )
        command.set_defaults(action=action, recipient=[])
        command.add_value("name", "NAME", "path before /_keyring")
        if recipients is not None:
            command.add_value("recipient", "FILE", "their keys, as `keys show` prints them", nargs=recipients)
        add_trust(command)
        add_client(command)
