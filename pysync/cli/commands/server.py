"""The arguments, help and examples of `pysync serve`, `check` and `bench`."""

from pysync.cli.parser import Parser, PrintSchema, add_client, add_config, add_storage_options, default_config


def add_server(parser: Parser) -> None:
    """Add `serve` and `check`."""
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


def add_bench(parser: Parser) -> None:
    """Add `bench`."""
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
