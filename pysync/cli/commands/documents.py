"""The arguments, help and examples of the commands that read and write documents, files and logs."""

from pysync.cli.parser import Parser, add_client, add_trust


def add_documents(parser: Parser) -> None:
    """Add the commands of documents and files."""
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


def add_logs(parser: Parser) -> None:
    """Add `append`, `tail` and `watch`."""
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


def add_usage(parser: Parser) -> None:
    """Add `usage`."""
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
