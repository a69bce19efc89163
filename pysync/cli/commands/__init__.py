"""The commands of `pysync`: each module has the arguments, help and examples of one subject."""

from pysync import __version__
from pysync.cli.commands.backup import add_backup
from pysync.cli.commands.credentials import add_certificates, add_keyrings, add_keys
from pysync.cli.commands.documents import add_documents, add_logs, add_usage
from pysync.cli.commands.events import add_events
from pysync.cli.commands.server import add_bench, add_server
from pysync.cli.commands.stores import add_inspection, add_maintenance
from pysync.cli.parser import EXIT_CODES, Parser


def build_parser() -> Parser:
    """Return the parser of the whole command line. `run` of its result is a command's module and function."""
    parser = Parser(
        prog="pysync",
        description="Keep documents in sync: the server, and a client for people and scripts.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"pysync {__version__}")
    add_server(parser)
    add_keys(parser.add_command("keys", "create and show keys"))
    add_certificates(parser.add_command("cap", "issue, show and revoke certificates"))
    add_documents(parser)
    add_keyrings(parser.add_command("keyring", "manage who can read sealed data"))
    add_logs(parser)
    add_usage(parser)
    add_inspection(parser)
    add_maintenance(parser)
    add_backup(parser)
    add_events(parser.add_command("events", "compact and query the files of events"))
    add_bench(parser)
    return parser
