"""The arguments, help and examples of `pysync backup`."""

from pysync.cli.parser import Parser, add_config

_PERIODS = ("snapshots", "hours", "days", "weeks", "months", "years")


def add_backup(parser: Parser) -> None:
    """Add `backup` and its commands."""
    backup = parser.add_command(
        "backup",
        "back up a store, and list, verify, prune and restore backups; servers may run meanwhile",
        "backup.make",
        description="Stores all of the store as of one moment, a snapshot. What an earlier backup in the "
        "same place has is not stored again. Prints the time of the snapshot, and what was read and written.",
        example="pysync backup --store file:./data --to file:./backup\n"
        "pysync backup --store file:./data --to s3://my-backup/sync --follow\n"
        "pysync backup restore --from file:./backup --to file:./data",
    )
    add_config(backup)
    backup.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    backup.add_value("--to", "URL", "where the backup lies: file:DIR or s3://BUCKET/PREFIX")
    backup.add_value("--key", "FILE", "encrypt for this key of `backup keygen`; FILE.pub suffices")
    backup.add_flag("--follow", "keep running, and back up what changes")
    backup.add_value(
        "--every",
        "SECONDS",
        "with --follow: time between two snapshots (default: 0.5)",
        type=float,
        default=0.5,
    )

    listing = backup.add_command(
        "list",
        "print the snapshots of a backup, oldest first",
        "backup.list_snapshots",
        example="pysync backup list --from file:./backup",
    )
    verify = backup.add_command(
        "verify",
        "read everything in a backup and list what is damaged or missing",
        "backup.verify",
        description="Prints a line of JSON for each damaged file, then the number of files and bytes read. "
        "With FILE.pub as the key of an encrypted backup, only the encrypted bytes are compared. The exit "
        "status is 1 if anything is damaged.",
        example="pysync backup verify --from file:./backup",
    )
    prune = backup.add_command(
        "prune",
        "remove old snapshots, and what only they refer to; backups may run meanwhile",
        "backup.prune",
        description="Keeps the newest snapshot, and the newest one of each of the last N periods that have "
        "any. Files that no snapshot refers to are deleted by the first prune that runs a day later, because "
        "a backup that runs now may refer to them. Packs of which more than a fifth is of no use are stored "
        "anew; if the backup is encrypted, that takes the private key.",
        example="pysync backup prune --from file:./backup --keep-daily 7 --keep-weekly 4",
    )
    for option, noun in zip(
        ("last", "hourly", "daily", "weekly", "monthly", "yearly"), _PERIODS, strict=True
    ):
        prune.add_value(f"--keep-{option}", "N", f"keep a snapshot of the last N {noun}", type=int, default=0)
    restore = backup.add_command(
        "restore",
        "write a snapshot into an empty store",
        "backup.restore",
        description="Run it again to continue a restore that was interrupted. Whoever followed the store "
        "that is restored gets a reset.",
        example="pysync backup restore --from file:./backup --at 2026-11-23T12:00:00Z --to file:./data",
    )
    for command in (listing, verify, prune, restore):
        command.add_argument(
            "--from", dest="source", metavar="URL", help="where the backup lies", required=True
        )
        command.add_value("--key", "FILE", "the key of an encrypted backup")
    restore.add_value(
        "--at", "TIME", "the newest snapshot up to this time, in UTC (default: the newest)", default="now"
    )
    restore.add_value("--to", "URL", "the empty store: file:DIR or s3://BUCKET/PREFIX", required=True)
    restore.add_value(
        "--coordinator",
        "URL",
        "of a bucket, which needs it: that of its servers, whose change log begins anew",
    )
    keygen = backup.add_command(
        "keygen",
        "create the key of an encrypted backup",
        "backup.keygen",
        description="Writes two files. FILE opens the backup: keep it elsewhere. FILE.pub makes backups and "
        "lists what is in them, but does not open documents and files.",
        example="pysync backup keygen --out backup-key.json",
    )
    keygen.add_value("--out", "FILE", "the file of the key, which must not exist", required=True)
