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
from pysync.backup.follow import BackupFollower, FollowerSettings, FollowStatus, adjust_process
from pysync.backup.format import iso_time, parse_time
from pysync.backup.make import BackupMaker
from pysync.backup.prune import DamagedSnapshot, KeepRules, Pruner
from pysync.backup.rebuild import rebuild as run_rebuild
from pysync.backup.restore import RestoreClock, Restorer, find_snapshot_at
from pysync.backup.snapshot import LISTS, PACKS, SNAPSHOTS, BackupDamaged, open_backup
from pysync.backup.source import identify_store, open_snapshot_source
from pysync.backup.target import check_apart
from pysync.backup.verify import BackupVerifier
from pysync.cli.io import print_lines
from pysync.cli.parser import Parser, add_config
from pysync.cli.progress import Progress
from pysync.cli.stores import check_store, load_config
from pysync.clock import wall_clock_ms
from pysync.concurrency import closing
from pysync.config import Config
from pysync.config.collection import wire_name
from pysync.coordinator import open_coordinator
from pysync.store import open_store


def add_backup(parser: Parser) -> None:
    """Add the arguments of `pysync backup`."""
    parser.describe(
        make,
        description="Stores all of the store as of one moment, a snapshot; servers may run meanwhile. An "
        "object that an earlier backup in the same place has is not stored again. Prints the time of the "
        "snapshot, and what was read and written.",
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
        "with --follow: time between two snapshots (default: 5)",
        type=float,
        default=5,
    )
    parser.add_flag(
        "--adopt", "continue the backup of the store that this one is a restored or copied version of"
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
        "Marks what is damaged, so that the next backup stores it anew. With FILE.pub as the key of an "
        "encrypted backup, only the encrypted bytes are compared. The exit status is 1 if there is damage.",
        example="pysync backup verify --from file:./backup",
    )
    prune_command = parser.add_command(
        "prune",
        "remove old snapshots, and what only they refer to; backups may run meanwhile",
        prune,
        description="Keeps the newest snapshot, and the newest one of each of the last N periods that have "
        "any, and deletes the files that no snapshot refers to any more. Packs of which more than a fifth is "
        "of no use are stored anew; if the backup is encrypted, that takes the private key. A snapshot that "
        "alone has what later ones have lost is kept.",
        example="pysync backup prune --from file:./backup --keep-daily 7 --keep-weekly 4\n"
        "pysync backup prune --from file:./backup --keep-daily 7 --purge --erased",
    )
    prune_command.add_flag(
        "--purge", "also store anew every file that has bytes or names to which no kept snapshot refers"
    )
    prune_command.add_flag(
        "--erased", "with --purge: also remove from kept snapshots what was erased from the store later"
    )
    prune_command.add_flag("--yes", "with --erased: do not ask")
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
    rebuild_command = parser.add_command(
        "rebuild",
        "make damaged lists and snapshots anew, from what packs say of themselves",
        rebuild,
        description="Reads all packs. If the backup is encrypted, that takes the private key. An object that "
        "was deleted may come back if no list says so any more.",
        example="pysync backup rebuild --from file:./backup",
    )
    restore_command = parser.add_command(
        "restore",
        "write a snapshot into an empty store",
        restore,
        description="Run it again to continue a restore that was interrupted. Whoever followed the store "
        "that is restored gets a reset.",
        example="pysync backup restore --from file:./backup --at 2026-11-23T12:00:00Z --to file:./data",
    )
    for command in (listing, verify_command, prune_command, rebuild_command, restore_command):
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
    restore_command.add_flag(
        "--accept-newer",
        "have replicas send back what they received after the snapshot",
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
    check_apart(settings.store.url, options.to)
    if options.follow:
        return await _follow(options, settings)
    async with open_backup(options.to, options.key, create=True) as repository:
        store_id = await identify_store(settings.store, repository, adopts=options.adopt)
        async with closing(open_snapshot_source(settings.store, wall_clock_ms)) as source:

            def report(key: str, why: str) -> None:
                progress.clear()
                _print_problem(key, why)

            maker = BackupMaker(source, repository, wall_clock_ms, report, settings.store.url, store_id)
            progress = Progress(lambda: (maker.report.objects, maker.report.bytes_read))
            try:
                async with progress:
                    snapshot = await maker.make()
            finally:
                await maker.close()
    assert snapshot is not None, "it is made even if nothing has changed"
    time = {"time": iso_time(snapshot.taken_ms), "number": snapshot.number}
    print_lines(time | _counts(maker.report))
    return 1 if maker.report.unreadable else 0


async def _follow(options: argparse.Namespace, settings: Config) -> int:
    """Back up until the process is ended. Returns 1 after an error."""
    adjust_process()
    if options.adopt:
        async with open_backup(options.to, options.key, create=True) as repository:
            await identify_store(settings.store, repository, adopts=True)
    every_ms = round(1000 * options.every)
    follower = BackupFollower(
        FollowerSettings(settings.store, options.to, options.key, every_ms), _print_status
    )
    following = asyncio.ensure_future(follower.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
    await asyncio.wait({following})
    if not following.cancelled():
        following.result()  # raises
    return 0


async def list_snapshots(options: argparse.Namespace) -> int:
    """Run `pysync backup list`: print each snapshot, oldest first. Return 1 if one is damaged."""
    damaged: list[str] = []
    async with open_backup(options.source, options.key) as repository:
        snapshots = await repository.snapshots(lambda _, why: damaged.append(why))
    for snapshot in snapshots:
        described = {"time": iso_time(snapshot.taken_ms), "number": snapshot.number, "store": snapshot.store}
        described["storeId"] = snapshot.store_id
        erasing = {"erasing": True} if snapshot.has_erasure else {}
        print_lines({**described, "unreadable": snapshot.unreadable, **erasing})
    for why in damaged:
        _print_problem("", f"{why}; `pysync backup rebuild` makes the snapshot anew")
    return 1 if damaged else 0


async def verify(options: argparse.Namespace) -> int:
    """Run `pysync backup verify`: print each damaged file, then the counts. Return 1 if any is damaged."""
    damaged: list[str] = []

    def report(name: str, why: str) -> None:
        progress.clear()
        damaged.append(name)
        print_lines({"file": name, "why": why})

    async with open_backup(options.source, options.key) as repository:
        verifier = BackupVerifier(repository, report)
        progress = Progress(lambda: (verifier.report.objects, verifier.report.bytes))
        async with progress:
            await verifier.run()
    print_lines(_counts(verifier.report))
    if any(name.startswith(SNAPSHOTS) for name in damaged):
        _print_problem("", "run `pysync backup rebuild` now: it makes damaged snapshots anew from packs")
    if not any(name.startswith((PACKS, LISTS)) for name in damaged):
        return 1 if damaged else 0
    if verifier.unmarked is None:
        _print_problem("", "run `pysync backup` now: it stores anew what the store still has")
    else:
        why = f"no backup stores them anew: {verifier.unmarked}"
        _print_problem("", f"damaged files could not be marked, so {why}")
    return 1


async def rebuild(options: argparse.Namespace) -> int:
    """Run `pysync backup rebuild`: make damaged lists anew. Return 1 if a pack is damaged, too."""
    problems: list[str] = []

    def report(key: str, why: str) -> None:
        problems.append(why)
        _print_problem(key, why)

    async with open_backup(options.source, options.key) as repository:
        rebuilt = await run_rebuild(repository, wall_clock_ms, report)
    print_lines(_counts(rebuilt))
    return 1 if problems or rebuilt.missing else 0


async def prune(options: argparse.Namespace) -> int:
    """Run `pysync backup prune`: remove snapshots, and print how many files went. Return 1 if something that
    should go is still there."""
    rules = KeepRules(*(getattr(options, f"keep_{name}") for name in KeepRules._fields))
    for name, count in rules._asdict().items():
        if count < 0:
            options.parser.error(f"--keep-{name} must not be negative")
    if not any(rules):
        options.parser.error("name what to keep, for example --keep-daily 7")
    if options.erased and not options.purge:
        options.parser.error("--erased is for --purge")
    if options.erased and not options.yes:
        _confirm("Remove what was erased from the store from all snapshots that are kept?", options.parser)
    async with open_backup(options.source, options.key) as repository:
        pruner = Pruner(
            repository,
            rules,
            wall_clock_ms,
            lambda why: _print_problem("", why),
            purges=options.purge,
            erases=options.erased,
        )
        try:
            await pruner.run()
        except DamagedSnapshot as error:
            command = removal_command(options.source, error.name)
            advice = (
                f"nothing is removed: `pysync backup rebuild` makes it anew, or give it up with `{command}`"
            )
            raise BackupDamaged(f"{error}: {advice}") from None
    for snapshot, objects, until in pruner.erased_objects:
        print_lines({"time": iso_time(snapshot.taken_ms), "erasedObjects": objects, "until": until})
    print_lines(_counts(pruner.report))
    return 0 if pruner.is_complete else 1


def _confirm(question: str, parser: Parser) -> None:
    """Ask a person, and exit unless they agree."""
    if not sys.stdin.isatty():
        parser.error("--erased needs --yes where nobody can be asked")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was removed")


def removal_command(url: str, name: str) -> str:
    """Return the shell command that removes a file of the backup at `url`."""
    kind, _, folder = url.partition(":")
    command, place = ("rm", folder) if kind == "file" else ("aws s3 rm", url.partition("?")[0])
    return f"{command} {shlex.quote(place.rstrip('/') + '/' + name)}"


async def restore(options: argparse.Namespace) -> int:
    """Run `pysync backup restore`. Return 1 if the backup lacks something."""
    at_ms = parse_time(options.at)
    to = config.parse({"version": 1, "store": options.to}).store
    if to.url == "memory:":
        options.parser.error("a memory: store ends with this command: name file:DIR or s3://BUCKET/PREFIX")
    check_apart(to.url, options.source)
    if to.url.startswith("s3:") and options.coordinator is None:
        options.parser.error(
            "name the coordinator of the servers of the bucket with --coordinator: its change log begins anew"
        )
    async with AsyncExitStack() as opened:
        repository = await opened.enter_async_context(open_backup(options.source, options.key))
        repository.check_readable()
        problems: list[str] = []

        progress = Progress(lambda: (restorer.report.objects, restorer.report.bytes))

        def report(key: str, why: str) -> None:
            progress.clear()
            problems.append(why)
            _print_problem(key, why)

        snapshot = await find_snapshot_at(repository, at_ms, report)
        change_log = None
        if options.coordinator is not None:
            change_log = await opened.enter_async_context(closing(open_coordinator(options.coordinator)))
        clock = RestoreClock(wall_clock_ms)
        opening = open_store(to, clock, accepts_unfinished_restore=True)
        store = await opened.enter_async_context(closing(opening))
        restorer = Restorer(repository, store, report, change_log, clock, accepts_newer=options.accept_newer)
        progress.whole = sum(one.entries for one in snapshot.lists)
        async with progress:
            await restorer.restore(snapshot)
    print_lines({"time": iso_time(snapshot.taken_ms), **_counts(restorer.report)})
    return 1 if problems else 0


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
        print_lines({"time": iso_time(status.moment_ms), **counts})


def _counts(report: Any) -> dict[str, int]:
    return {wire_name(name): count for name, count in dataclasses.asdict(report).items()}


def _print_problem(key: str, why: str) -> None:
    print(f"pysync: {key}: {why}" if key else f"pysync: {why}", file=sys.stderr)
