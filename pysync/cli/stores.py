"""The commands that open a store themselves: `copy`, `verify`, `gc`, `erase` and `project rebuild`."""

import argparse
import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

from pysync import config
from pysync.backup.repair import Repairer, RepairReport
from pysync.backup.snapshot import open_backup
from pysync.changelog import Retention
from pysync.cli.io import print_json, print_lines
from pysync.cli.parser import Parser, add_config, add_storage_options
from pysync.cli.progress import Progress
from pysync.clock import SteadyClock, wall_clock_ms
from pysync.concurrency import closing
from pysync.config import Config
from pysync.config.collection import wire_name
from pysync.coordinator import open_coordinator
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.erase import Eraser, EraseRequest
from pysync.errors import StoreUnavailable
from pysync.migrate import (
    MIN_GRACE_MS,
    SCRUB_KEY,
    VERIFY_KEY,
    Copier,
    Damage,
    GarbageCollector,
    VerificationReport,
    Verifier,
    open_source,
    open_target,
    parse_location,
)
from pysync.migrate.locations import check_exists
from pysync.plugins import PluginContext, loader
from pysync.plugins.hooks import Hooks
from pysync.plugins.projection import projections_in, projections_of
from pysync.plugins.projection.lists import ListWriter
from pysync.plugins.projection.rebuild import catch_up, rebuild
from pysync.sqlite.database_file import quick_check
from pysync.store import EtagMismatch, ReadableStore, Store, open_store

_DAMAGED: Final = ("corrupt: ", "unreadable: ")
_MISSED_WRITES_WARNING: Final = (
    "the memory: coordinator belongs to one process: stop the server first, or the lists may miss what it "
    "writes meanwhile"
)
_UNANNOUNCED_WARNING: Final = (
    "the memory: coordinator belongs to one process: a running server does not announce what is erased; use "
    "POST /admin/erase there"
)


def add_copy(parser: Parser) -> None:
    """Add the arguments of `pysync copy`."""
    parser.describe(
        copy,
        description="FROM and TO are file:DIR, s3://BUCKET/PREFIX (credentials from the environment) or a "
        "configuration file, whose store is used. FROM may be folder:DIR, the folder of a Starfish server.",
        example="pysync copy file:./data s3://my-bucket/pysync",
    )
    parser.add_value("source", "FROM", "the store to read")
    parser.add_value("target", "TO", "the store to write")
    parser.add_flag("--overwrite", "replace objects that differ at TO")
    parser.add_flag("--keep-corrupt", "also copy corrupt objects, and report them")
    parser.add_flag(
        "--quick", "trust the recorded hashes of files that exist at TO, instead of reading these files"
    )
    parser.add_value("--coordinator", "URL", "of the servers of a bucket TO: its change log begins anew")


def add_verify(parser: Parser) -> None:
    """Add the arguments of `pysync verify`."""
    parser.describe(
        verify,
        description="Compares every document, log, file and revocation list with its hash or checksum; "
        "servers may run meanwhile. Prints a line of JSON for each damaged object, and for each file in the "
        "folder that the store does not know, then the number of objects and bytes read. From then on the "
        "server refuses to serve a damaged file until it is pushed or copied again. The exit status is 1 if "
        "anything is damaged.",
        example="pysync verify --store file:./data\n"
        "pysync verify --store file:./data --repair-from file:./backup",
    )
    add_config(parser)
    parser.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    parser.add_value(
        "--repair-from", "URL", "a backup of this store: replace what is damaged by the same version from it"
    )
    parser.add_value("--key", "FILE", "with --repair-from: the key of an encrypted backup")
    parser.add_flag(
        "--adopt",
        "take files below DIR/files that somebody replaced, edited or added as new versions, as they are now",
    )


def add_gc(parser: Parser) -> None:
    """Add the arguments of `pysync gc`."""
    parser.describe(
        collect,
        description="Deletes segments that no log leads to, chunks of logs that pysync took over from "
        "Starfish, files in the folder that the store does not know, temporary files, interrupted uploads "
        "and merges; without --store, also earlier versions of documents whose collection keeps none any "
        "more. Prints a line of JSON for each, then the number of each kind, and the bytes as far as they "
        "are known. Servers may run meanwhile, but no copy or restore into the store. The exit status is 1 "
        "if a damaged object, which may lead to segments, kept it from deleting any.",
        example="pysync gc --store file:./data --dry-run",
    )
    add_config(parser)
    parser.add_value("--store", "URL", "file:DIR (default: file:./data) or s3://BUCKET/PREFIX")
    parser.add_flag("--dry-run", "print what would be deleted, and delete nothing")
    parser.add_value(
        "--older-than",
        "SECONDS",
        "keep what is younger (default: 3600; minimum: 1800)",
        type=int,
        default=3600,
    )


def add_erase(parser: Parser) -> None:
    """Add the arguments of `pysync erase`."""
    parser.describe(
        erase,
        description="Prints a report: what was erased, by kind, and what was not touched. Servers may run "
        "meanwhile. Killed at any point, it is finished when it is run again, or when a server starts.",
        example="pysync erase --identity 5d41402abc4b2a76b9719d911017c592 --dry-run\n"
        "pysync erase --key users/5d41402abc4b2a76b9719d911017c592/profile",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="KEY", help="the document, log or file at this key")
    what.add_argument("--prefix", metavar="PREFIX", help="everything at this key and below it")
    what.add_argument(
        "--identity", metavar="ID", help="everything whose key has this user id in place of {identity}"
    )
    parser.add_value(
        "--kem-key",
        "KEY",
        "X25519 public key of that person, whose entries leave the keyrings of others; repeatable",
        action="append",
        default=[],
    )
    parser.add_flag("--dry-run", "only report what would be erased")
    add_config(parser, required=True)
    add_storage_options(parser)


def add_project(parser: Parser) -> None:
    """Add the arguments of `pysync project`."""
    rebuild_command = parser.add_command(
        "rebuild",
        "rebuild the lists of a projection from their sources; servers may run meanwhile",
        rebuild_lists,
        description="Prints each list: its entries, and how many were missing, different or superfluous.",
        example="pysync project rebuild titles --config pysync.json",
    )
    rebuild_command.add_value("name", "NAME", "name or target of the projection")
    add_config(rebuild_command, required=True)
    add_storage_options(rebuild_command)


async def copy(options: argparse.Namespace) -> int:
    """Run `pysync copy`, and report the progress, also if the copy fails. Return 1 if it is incomplete."""
    from_, to = parse_location(options.source), parse_location(options.target)
    if from_ == to:
        raise ValueError("FROM and TO are the same store")
    damaged: list[str] = []

    def report(key: str, text: str) -> None:
        progress.clear()
        line = f"pysync: {key}: {text}"
        print(line, file=sys.stderr)
        if text.startswith(_DAMAGED):
            damaged.append(line)

    url = options.coordinator
    opening = nullcontext() if url is None else closing(open_coordinator(url))
    async with closing(open_source(from_)) as source, closing(open_target(to)) as target, opening as log:
        copier = Copier(
            source,
            target,
            report,
            overwrite=options.overwrite,
            keep_corrupt=options.keep_corrupt,
            quick=options.quick,
            change_log=log,
        )
        copied = copier.report
        progress = Progress(lambda: (copied.copied + copied.already_there, copied.bytes))
        try:
            progress.whole = await last_count(source)
            async with progress:
                await copier.run()
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error}; run the copy again to continue") from error
        finally:
            if damaged:
                count = "1 object is" if len(damaged) == 1 else f"{len(damaged)} objects are"
                print(f"pysync: {count} damaged or unreadable:", *damaged, sep="\n", file=sys.stderr)
            print_json({wire_name(name): count for name, count in dataclasses.asdict(copied).items()})
    return 0 if copier.report.is_complete else 1


_NO_ROW: Final = "no row names this file: `pysync gc` deletes it, `pysync verify --adopt` keeps it"


async def verify(options: argparse.Namespace) -> int:
    """Run `pysync verify`: print each damaged object, then the counts. Return 1 if any is damaged."""
    if options.key is not None and options.repair_from is None:
        options.parser.error("--key is for --repair-from")
    if options.adopt and options.repair_from is not None:
        options.parser.error("--adopt keeps what --repair-from replaces: choose one of them")
    settings = load_config(options, "store")
    if options.adopt and not settings.store.url.startswith("file:"):
        raise ValueError("--adopt is for a store in a folder")
    check_store(settings, "there is nothing to verify")
    verified = VerificationReport()
    kind, _, folder = settings.store.url.partition(":")
    if kind == "file" and (found := quick_check(Path(folder) / "pysync.db", with_indexes=True)):
        verified.damaged += 1
        print_lines({"key": "pysync.db", "kind": "database", "why": found})
    damages: list[Damage] = []

    progress = Progress(lambda: (verified.objects, verified.bytes))

    def report(damage: Damage) -> None:
        progress.clear()
        damages.append(damage)
        print_lines({"key": damage.key, "kind": damage.kind, "why": damage.why})

    repaired, adopted = RepairReport(), set[str]()
    backup = nullcontext() if options.repair_from is None else open_backup(options.repair_from, options.key)
    try:
        async with backup as repository, closing(open_store(settings.store)) as store:
            progress.whole = await last_count(store)
            async with progress:
                await Verifier(store, report, report=verified).run()
            await verified.record(store, VERIFY_KEY, wall_clock_ms())
            if kind == "file" and not options.adopt:
                for leftover in await store.remove_leftovers(wall_clock_ms(), dry_run=True):
                    if leftover.kind == "files":
                        print_lines({"key": leftover.name, "kind": "leftover", "why": _NO_ROW})
            if repository is not None:
                await Repairer(repository, store, _print_outcome, repaired).repair(damages)
            if options.adopt:
                await _adopt(store, damages, adopted)
    except StoreUnavailable as error:
        if not verified.damaged:
            raise
        print(f"pysync: {error}", file=sys.stderr)
    finally:
        counts = {} if options.repair_from is None else {"repaired": repaired.repaired}
        if options.adopt:
            counts["adopted"] = len(adopted)
        print_lines({**dataclasses.asdict(verified), **counts})
    resolved = repaired.repaired + sum(damage.key in adopted for damage in damages)
    return 1 if verified.damaged > resolved else 0


async def _adopt(store: Store, damages: list[Damage], adopted: set[str]) -> None:
    """Take the files that are damaged, and those without a row, as they are on disk. Add their keys to
    `adopted`."""
    assert store.transactional is not None, "a store in a folder"
    keys = [damage.key for damage in damages if damage.kind == "file"]
    leftovers = await store.remove_leftovers(wall_clock_ms(), dry_run=True)
    keys += [leftover.name for leftover in leftovers if leftover.kind == "files"]
    for key in keys:
        try:
            sha256 = await store.transactional.adopt(key)
        except EtagMismatch:
            print_lines({"key": key, "adopted": False, "why": "it was written meanwhile"})
        except ValueError as error:
            print_lines({"key": key, "adopted": False, "why": str(error)})
        else:
            adopted.add(key)
            print_lines({"key": key, "adopted": True, "sha256": sha256})


def _print_outcome(key: str, why: str | None) -> None:
    """Print whether a damaged object was repaired, or why not."""
    print_lines({"key": key, "repaired": why is None, **({} if why is None else {"why": why})})


async def last_count(store: ReadableStore) -> int:
    """Return the number of objects that the last scrub found in the store; 0 if it is not known."""
    last = await VerificationReport.recorded(store, SCRUB_KEY)
    return 0 if last is None else last["objects"]


def load_config(options: argparse.Namespace, *flags: str) -> Config:
    """Return the configuration that the options name, and prefix warnings with the name of the command."""
    logging.basicConfig(format="pysync: %(message)s", level=logging.WARNING)
    overrides = {flag: getattr(options, flag) for flag in flags}
    if options.config is None:
        return config.parse({}, os.environ, overrides)
    loader.add_config_dir_to_path(options.config)
    return config.load(options.config, os.environ, overrides)


def check_store(settings: Config, consequence: str) -> None:
    """Raise ValueError if the store of the configuration does not exist outside of a server."""
    if settings.store.url == "memory:":
        raise ValueError(f"a memory: store exists only inside its server: {consequence}")
    check_exists(settings.store.url)


async def rebuild_lists(options: argparse.Namespace) -> int:
    """Run `pysync project rebuild`: print the outcome of each list. Return 1 after a failure."""
    settings = load_config(options, "store", "coordinator")
    projections = projections_in(loader.load_plugins(settings, projections_of(settings)))
    chosen = [one for one in projections if one.name == options.name]
    if not chosen:
        names = ", ".join(one.name for one in projections) or "none"
        raise ValueError(f"there is no projection {options.name}; there are: {names}")
    check_store(settings, "there is nothing to rebuild")
    if not settings.store.url.startswith("file:") and settings.effective_coordinator == "memory:":
        print(f"pysync: {_MISSED_WRITES_WARNING}", file=sys.stderr)
    failures: list[str] = []

    def count(metric: str, *labels: str, by: int = 1) -> None:
        if metric.endswith(("_failures", "_drops")):
            failures.append(metric)

    async with open_services(settings, count) as services:
        lists = ListWriter(projections, services)
        begun, outcomes = await rebuild(lists, chosen, services.outbox.log)
        if not await catch_up(lists, services.outbox.log, begun):
            raise ValueError("too many changes were written meanwhile: run the rebuild again")
    for key, outcome in sorted(outcomes.items()):
        if outcome.entries or outcome.changed:
            print_lines({"list": key, "entries": outcome.entries, "changed": outcome.changed})
    return 1 if failures else 0


@asynccontextmanager
async def open_services(
    settings: Config, count: Callable[..., None] = lambda metric, *labels, by=1: None
) -> AsyncIterator[PluginContext]:
    """Yield the objects of a service that servers may share with this process. Raises ValueError,
    StoreUnavailable and CoordinatorUnavailable if they cannot be opened."""
    kind, _, folder = settings.store.url.partition(":")
    own_folder = folder if kind == "file" else None
    retention = Retention(
        settings.changes.max_count, settings.changes.max_age_ms, settings.changes.removals_ms
    )
    async with (
        closing(open_store(settings.store, shared=True, retention=retention)) as store,
        closing(
            open_coordinator(settings.effective_coordinator, own_folder, wall_clock_ms, retention)
        ) as coordinator,
    ):
        outbox = outbox_of(store, coordinator)
        yield PluginContext(
            config=settings,
            store=store,
            coordinator=coordinator,
            outbox=outbox,
            files=Files(store, wall_clock_ms, outbox),
            documents=Documents(store, coordinator, wall_clock_ms, outbox),
            logs=AppendLogs(store, coordinator, wall_clock_ms, outbox=outbox),
            now_ms=wall_clock_ms,
            sweeps=False,
            count=count,
        )


async def collect(options: argparse.Namespace) -> int:
    """Run `pysync gc`: print what is deleted, then the counts. Return 1 if damage kept it from deleting."""
    settings = load_config(options, "store")
    check_store(settings, "there is no garbage")
    grace_ms = options.older_than * 1000
    if grace_ms < MIN_GRACE_MS:
        raise ValueError(
            f"--older-than must be at least {MIN_GRACE_MS // 1000}: younger objects may be in use"
        )
    # A configuration says nothing about the collections of another store.
    knows_collections = options.config is not None and options.store is None
    async with closing(open_store(settings.store)) as store:

        def report(kind: str, key: str) -> None:
            progress.clear()
            print_lines({"kind": wire_name(kind), "key": key})

        collector = GarbageCollector(
            store,
            SteadyClock(),
            report,
            has_history=partial(_has_history, settings) if knows_collections else None,
            grace_ms=grace_ms,
            dry_run=options.dry_run,
        )
        progress = Progress(lambda: (collector.listed, collector.report.bytes))
        try:
            async with progress:
                await collector.run()
        finally:
            counts = dataclasses.asdict(collector.report)
            unclear = counts.pop("unclear")
            print_lines({wire_name(name): count for name, count in counts.items()})
    for key in sorted(unclear):
        print(f"pysync: {key} is damaged, and may lead to segments: all are kept", file=sys.stderr)
    return 1 if unclear else 0


def _has_history(settings: Config, key: str) -> bool:
    """Return True if a collection that may have this key keeps earlier versions."""
    return any(
        collection.history is not None and collection.key_template.matches(key)
        for _, _, collection in settings.each_collection()
    )


async def erase(options: argparse.Namespace) -> None:
    """Run `pysync erase`, and print the report."""
    members = {"key": options.key, "prefix": options.prefix, "identity": options.identity}
    request = EraseRequest.parse(members | {"kemKeys": options.kem_key})
    settings = load_config(options, "store", "coordinator")
    check_store(settings, "use POST /admin/erase there")
    if not settings.store.url.startswith("file:") and settings.effective_coordinator == "memory:":
        print(f"pysync: {_UNANNOUNCED_WARNING}", file=sys.stderr)
    plugins = loader.load_plugins(settings, projections_of(settings))
    async with open_services(settings) as services:
        eraser = Eraser(services, projections_in(plugins), Hooks(plugins).stored_files)
        async with Progress(lambda: (eraser.report.erased.total(), eraser.report.bytes)):
            report = await (eraser.dry_run(request) if options.dry_run else eraser.run(request))
    print_json(report.describe(request, is_dry_run=options.dry_run))
    if settings.backup is not None and not options.dry_run:
        place = f"--from {shlex.quote(settings.backup.to)}"
        key = "" if settings.backup.key_file is None else " --key PRIVATE-KEY"
        print(
            "pysync: the backup has it until this is run, after the next snapshot: pysync backup prune "
            f"{place}{key} --keep-daily 7 --purge --erased",
            file=sys.stderr,
        )
    if not report.is_found:
        kind, value = request.kind, request.value
        print(
            f"pysync: nothing that belongs to the {kind} {value} was found: check its spelling",
            file=sys.stderr,
        )
