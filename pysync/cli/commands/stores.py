"""The arguments, help and examples of the commands that work on a store, without a server."""

from pysync.cli.parser import Parser, add_config, add_storage_options


def add_inspection(parser: Parser) -> None:
    """Add `stats` and `get`."""
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


def add_maintenance(parser: Parser) -> None:
    """Add the commands that copy, check and clean a store."""
    copy = parser.add_command(
        "copy",
        "copy everything in a store to another one; run it again to continue or to catch up",
        "stores.copy",
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
        "stores.verify",
        description="Compares every document, log, file and revocation list with its hash or checksum. "
        "Prints a line of JSON for each damaged object, and for each file in the folder that the store does "
        "not know, then the number of objects and bytes read. From then on the server refuses to serve a "
        "damaged file until it is pushed or copied again. The exit status is 1 if anything is damaged.",
        example="pysync verify --store file:./data\n"
        "pysync verify --store file:./data --repair-from file:./backup",
    )
    add_config(verify)
    verify.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    verify.add_value(
        "--repair-from", "URL", "a backup of this store: replace what is damaged by the same version from it"
    )
    verify.add_value("--key", "FILE", "with --repair-from: the key of an encrypted backup")
    verify.add_flag(
        "--adopt",
        "take files below DIR/files that somebody replaced, edited or added as new versions, as they are now",
    )

    gc = parser.add_command(
        "gc",
        "delete what crashes and interrupted requests left in a store; servers may run meanwhile",
        "gc.collect",
        description="Deletes segments that no log leads to, chunks of logs that pysync took over from "
        "Starfish, files in the folder that the store does not know, temporary files, interrupted uploads "
        "and merges; without --store, also earlier versions of documents whose collection keeps none any "
        "more. Prints a line of JSON for each, then the "
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
        "stores.rebuild_lists",
        description="Prints each list: its entries, and how many were missing, different or superfluous.",
        example="pysync project rebuild titles --config pysync.json",
    )
    rebuild.add_value("name", "NAME", "name or target of the projection")
    add_config(rebuild, required=True)
    add_storage_options(rebuild)
