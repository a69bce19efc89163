"""The machine that serves: free space, the mode of the data folder, and the limit of open files."""

import resource
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from pysync.config import Config, Problem
from pysync.diagnose.report import Report

MIN_FREE_BYTES: Final = 1 << 30
"""Bytes of free space below which there is a warning."""


def probe_machine(config: Config, report: Report) -> None:
    """Add what the machine has for the service, as the user and with the limits of this process. Folders that
    do not exist yet are left out."""
    folders = {path.parent: of for of, path in reversed(config.database_paths) if path.parent.is_dir()}
    for folder, of in folders.items():
        _check_space(of, folder, report)
        mode = stat.S_IMODE(folder.stat().st_mode)
        report.rows.append((f"{of} mode", f"{mode:04o}"))
        if mode & 0o077:
            report.warnings.append(Problem(of, f"other users may enter {folder}: chmod 700 {folder}"))
    if config.store.url.startswith("s3:"):
        _check_space("TMPDIR", Path(tempfile.gettempdir()), report)
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    report.rows.append(("open files", f"{allowed:,} at most"))
    wanted = config.server.max_connections + config.server.max_streams
    if allowed < wanted:
        message = f"{allowed:,} may be open, fewer than maxConnections and maxStreams together ({wanted:,})"
        report.warnings.append(Problem("server", f"{message}: raise the limit (LimitNOFILE=, ulimit -Hn)"))


def _check_space(of: str, folder: Path, report: Report) -> None:
    found = shutil.disk_usage(folder)
    report.rows.append((f"{of} space", f"{found.free / 1e9:.1f} of {found.total / 1e9:.1f} GB free"))
    if found.free < MIN_FREE_BYTES:
        report.warnings.append(Problem(of, f"{folder} has less than 1 GiB of free space"))
