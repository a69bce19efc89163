"""`pysync backup`: make, list, verify, prune and restore backups, and make their keys."""

import argparse
import asyncio
import dataclasses
import os
import shlex
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

from pysync import config
from pysync.backup.checking import BackupVerifier
from pysync.backup.following import (
    BackupFollower,
    FollowerSettings,
    FollowStatus,
    adjust_process,
)
from pysync.backup.making import BackupMaker
from pysync.backup.opening import open_backup
from pysync.backup.pruning import DamagedSnapshot, KeepRules
from pysync.backup.pruning import prune as run_prune
from pysync.backup.repository import BackupDamaged, iso_time
from pysync.backup.restoring import RestoreClock, Restorer, check_restore_target, find_snapshot_at, parse_time
from pysync.backup.source import open_snapshot_source
from pysync.cli.io import print_lines
from pysync.cli.parser import Parser, add_config
from pysync.cli.stores import check_store, load_config
from pysync.clock import wall_clock_ms
from pysync.concurrency import closing
from pysync.config.collection import wire_name
from pysync.coordinator import open_coordinator
from pysync.store import open_store


def add_backup(parser: Parser) -> None:
    """Add the arguments of `pysync backup`."""
    parser.describe(
        make,
        description="Stores all of the store as of one moment, a snapshot. What an earlier backup in the "
        "same place has is not stored again. Prints the time of the snapshot, and what was read and written.",
        example="pysync backup --store file:./data --to file:./backup\n"
        "pysync backup --store file:./data --to s3://my-backup/sync --follow\n"
        "pysync backup restore --from file:./backup --to file:./data",
    )
    add_config(parser)
    parser.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    parser.add_value("--to", "URL", "where the backup lies: file:DIR or s3://BUCKET/PREFIX")
    parser.add_value("--key", "FILE", "encrypt for this key of `backup keygen`; FILE.pub suffices")
    parser.add_flag("--follow", "keep running, and back up what changes")
    parser.add_value(
        "--every",
        "SECONDS",
        "with --follow: time between two snapshots (default: 0.5)",
        type=float,
        default=0.5,
    )

    listing = parser.add_command(
        "list",
        "print the snapshots of a backup, oldest first",
        list_snapshots,
        example="pysync backup list --from file:./backup",
    )
    verify_command = parser.add_command(
        "verify",
        "read everything in a backup and list what is damaged or missing",
        verify,
        description="Prints a line of JSON for each damaged file, then the number of files and bytes read. "
        "With FILE.pub as the key of an encrypted backup, only the encrypted bytes are compared. The exit "
        "status is 1 if anything is damaged.",
        example="pysync backup verify --from file:./backup",
    )
    prune_command = parser.add_command(
        "prune",
        "remove old snapshots, and what only they refer to; backups may run meanwhile",
        prune,
        description="Keeps the newest snapshot, and the newest one of each of the last N periods that have "
        "any. Files that no snapshot refers to are deleted by the first prune that runs a day later, because "
        "a backup that runs now may refer to them. Packs of which more than a fifth is of no use are stored "
        "anew; if the backup is encrypted, that takes the private key.",
        example="pysync backup prune --from file:./backup --keep-daily 7 --keep-weekly 4",
    )
    for option, noun in (
        ("last", "snapshots"),
        ("hourly", "hours"),
        ("daily", "days"),
        ("weekly", "weeks"),
        ("monthly", "months"),
        ("yearly", "years"),
    ):
        prune_command.add_value(
            f"--keep-{option}", "N", f"keep a snapshot of the last N {noun}", type=int, default=0
        )
    restore_command = parser.add_command(
        "restore",
        "write a snapshot into an empty store",
        restore,
        description="Run it again to continue a restore that was interrupted. Whoever followed the store "
        "that is restored gets a reset.",
        example="pysync backup restore --from file:./backup --at 2026-11-23T12:00:00Z --to file:./data",
    )
    for command in (listing, verify_command, prune_command, restore_command):
        command.add_argument(
            "--from", dest="source", metavar="URL", help="where the backup lies", required=True
        )
        command.add_value("--key", "FILE", "the key of an encrypted backup")
    restore_command.add_value(
        "--at", "TIME", "the newest snapshot up to this time, in UTC (default: the newest)", default="now"
    )
    restore_command.add_value("--to", "URL", "the empty store: file:DIR or s3://BUCKET/PREFIX", required=True)
    restore_command.add_value(
        "--coordinator",
        "URL",
        "of a bucket, which needs it: that of its servers, whose change log begins anew",
    )
    keygen_command = parser.add_command(
        "keygen",
        "create the key of an encrypted backup",
        keygen,
        description="Writes two files. FILE opens the backup: keep it elsewhere. FILE.pub makes backups and "
        "lists what is in them, but does not open documents and files.",
        example="pysync backup keygen --out backup-key.json",
    )
    keygen_command.add_value("--out", "FILE", "the file of the key, which must not exist", required=True)


async def make(options: argparse.Namespace) -> int:
    """Run `pysync backup`: make a backup and print what it wrote. Return 1 if something could not be read."""
    if options.to is None:
        options.parser.error("the following arguments are required: --to")
    if options.every <= 0:
        options.parser.error("--every must be more than 0")
    settings = load_config(options, "store")
    check_store(settings, "there is nothing to back up")
    if options.follow:
        adjust_process()
        place = FollowerSettings(settings.store, options.to, options.key, round(1000 * options.every))
        following = asyncio.ensure_future(BackupFollower(place, _print_status).run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
        await asyncio.wait({following})
        if not following.cancelled():
            following.result()  # raises
        return 0
    async with (
        open_backup(options.to, options.key, create=True) as repository,
        closing(open_snapshot_source(settings.store, wall_clock_ms)) as source,
    ):
        maker = BackupMaker(source, repository, wall_clock_ms, _print_problem, settings.store.url)
        try:
            snapshot = await maker.make()
        finally:
            await maker.close()
        assert snapshot is not None
        print_lines({"time": iso_time(snapshot.taken_ms), **_counts(maker.report)})
    return 1 if maker.report.unreadable else 0


async def list_snapshots(options: argparse.Namespace) -> int:
    """Run `pysync backup list`: print each snapshot, oldest first. Return 1 if one is damaged."""
    status = 0
    async with open_backup(options.source, options.key) as repository:
        for name in await repository.snapshot_names():
            try:
                snapshot = await repository.find_snapshot(name)
            except BackupDamaged as error:
                _print_problem("", str(error))
                status = 1
                continue
            if snapshot is not None and snapshot.is_complete:
                described = {"time": iso_time(snapshot.taken_ms), "store": snapshot.store}
                print_lines({**described, "unreadable": snapshot.unreadable})
    return status


async def verify(options: argparse.Namespace) -> int:
    """Run `pysync backup verify`: print each damaged file, then the counts. Return 1 if any is damaged."""
    async with open_backup(options.source, options.key) as repository:
        verifier = BackupVerifier(repository, lambda name, why: print_lines({"file": name, "why": why}))
        await verifier.run()
    print_lines(_counts(verifier.report))
    return 1 if verifier.report.damaged else 0


async def prune(options: argparse.Namespace) -> None:
    """Run `pysync backup prune`: remove snapshots, and print how many files went."""
    rules = KeepRules(*(getattr(options, f"keep_{name}") for name in KeepRules._fields))
    for name, count in rules._asdict().items():
        if count < 0:
            options.parser.error(f"--keep-{name} must not be negative")
    if not any(rules):
        options.parser.error("name what to keep, for example --keep-daily 7")
    async with open_backup(options.source, options.key) as repository:
        try:
            report = await run_prune(repository, rules, wall_clock_ms())
        except DamagedSnapshot as error:
            command = removal_command(options.source, error.name)
            advice = f"nothing is removed: give up this snapshot with `{command}`, and prune again"
            raise BackupDamaged(f"{error}: {advice}") from None
    print_lines(_counts(report))


def removal_command(url: str, name: str) -> str:
    """Return the shell command that removes a file of the backup at `url`."""
    kind, _, folder = url.partition(":")
    command, place = ("rm", folder) if kind == "file" else ("aws s3 rm", url.partition("?")[0])
    return f"{command} {shlex.quote(place.rstrip('/') + '/' + name)}"


async def restore(options: argparse.Namespace) -> int:
    """Run `pysync backup restore`. Return 1 if the backup lacks something."""
    at_ms = parse_time(options.at)
    to = config.parse({"version": 1, "store": options.to}).store
    check_restore_target(to.url)
    if to.url.startswith("s3:") and options.coordinator is None:
        options.parser.error(
            "name the coordinator of the servers of the bucket with --coordinator: its change log begins anew"
        )
    async with AsyncExitStack() as opened:
        repository = await opened.enter_async_context(open_backup(options.source, options.key))
        repository.check_readable()
        snapshot = await find_snapshot_at(repository, at_ms, _print_problem)
        change_log = None
        if options.coordinator is not None:
            change_log = await opened.enter_async_context(closing(open_coordinator(options.coordinator)))
        clock = RestoreClock(wall_clock_ms)
        opening = open_store(to, clock, accepts_unfinished_restore=True)
        store = await opened.enter_async_context(closing(opening))
        restorer = Restorer(repository, store, _print_problem, change_log, clock)
        await restorer.restore(snapshot)
    print_lines({"time": iso_time(snapshot.taken_ms), **_counts(restorer.report)})
    return 1 if restorer.report.damaged else 0


def keygen(options: argparse.Namespace) -> None:
    """Run `pysync backup keygen`: write the key, and the part of it that makes backups."""
    from pysync.backup.encryption import BackupKey

    key = BackupKey.generate()
    for name, text in ((options.out, key.text()), (f"{options.out}.pub", key.without_private().text())):
        with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)


def _print_status(status: FollowStatus) -> None:
    """Print a line about each snapshot of a follower. It logs errors itself."""
    if status.objects:
        counts = {"objects": status.objects, "bytesWritten": status.bytes_written}
        print_lines({"time": iso_time(status.taken_ms), **counts})


def _counts(report: Any) -> dict[str, int]:
    return {wire_name(name): count for name, count in dataclasses.asdict(report).items()}


def _print_problem(key: str, why: str) -> None:
    print(f"pysync: {key}: {why}" if key else f"pysync: {why}", file=sys.stderr)
