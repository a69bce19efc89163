"""Searches all bytes of a folder, without touching the locks that this process holds on its databases."""

import subprocess
from pathlib import Path


def files_with(folder: Path, *texts: str) -> set[str]:
    """The paths of all files and folders below `folder` whose name or bytes contain one of the texts."""
    # To close a file of a database would release this process's locks, so another process reads them.
    command = ["grep", "--recursive", "--files-with-matches", "--text", "--fixed-strings"]
    patterns = [part for text in texts for part in ("-e", text)]
    found = subprocess.run([*command, *patterns, "."], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert found.returncode in (0, 1)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    named = {name for name in names if any(text in name for text in texts)}
    return named | {line.removeprefix("./") for line in found.stdout.splitlines()}
