"""What an erasure costs: the time until a person is gone from a folder, and what writers notice meanwhile.

    python -m benches.erasure [--documents 100000] [--bytes 2000] [--runs 5]

Fills a folder with documents of many people, erases one of them with `pysync erase`, and puts documents all
the time from another process, each durably. Prints a line of JSON for each run: the seconds of the command,
those of another removal of traces alone, its megabytes of the database per second, and the slowest put.
"""

import argparse
import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from pysync.store.local.store import LocalStore

PEOPLE = 1_000
CONFIG = {
    "version": 1,
    "collections": [
        {
            "name": "notes",
            "storagePath": "users/{identity}/{id}",
            "readRoles": ["self"],
            "writeRoles": ["self"],
        }
    ],
}


def user_id(number: int) -> str:
    """Return the user id of a person."""
    return f"{number:032x}"


async def create(folder: Path) -> None:
    """Create an empty store."""
    await (await LocalStore.open_folder(folder)).close()


def fill(folder: Path, documents: int, size: int) -> None:
    """Write documents into the database, without their checksums."""
    with closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        database.execute("BEGIN")
        database.executemany(
            "INSERT INTO object(parent, name, etag, content_type, modified_ms, body) "
            "VALUES(?, ?, ?, ?, 0, ?)",
            (
                (f"users/{user_id(n % PEOPLE)}", f"{n}", f"{n:x}", "application/json", os.urandom(size))
                for n in range(documents)
            ),
        )
        database.execute("COMMIT")


async def push(folder: Path) -> None:
    """Put documents until the input ends, and print the seconds of the slowest put."""
    store = await LocalStore.open_folder(folder)
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    slowest, failed, n = 0.0, 0, 0
    while not end.done():
        begun = time.perf_counter()
        try:
            await store.put(f"users/others/{n % 100}", b"x" * 500)
        except Exception:
            failed += 1
        slowest = max(slowest, time.perf_counter() - begun)
        n += 1
    await store.close()
    print(json.dumps({"puts": n, "failed": failed, "slowestMs": round(slowest * 1000)}))


async def purge(folder: Path) -> float:
    """Return the seconds that `purge_deleted` takes."""
    store = await LocalStore.open_folder(folder)
    begun = time.perf_counter()
    await store.purge_deleted()
    taken = time.perf_counter() - begun
    await store.close()
    return taken


def run(folder: Path, identity: int) -> dict[str, float]:
    """Erase one person while another process pushes."""
    config = folder.with_name("pysync.json")
    config.write_text(json.dumps(CONFIG | {"store": f"file:{folder}"}))
    pushing = subprocess.Popen(
        [sys.executable, "-m", "benches.erasure", "--push", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    begun = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "pysync",
        "erase",
        "--identity",
        user_id(identity),
        "--config",
        str(config),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    taken = time.perf_counter() - begun
    output, _ = pushing.communicate("")
    size = (folder / "pysync.db").stat().st_size / 1e6
    alone = asyncio.run(purge(folder))
    return {
        "eraseS": round(taken, 2),
        "purgeS": round(alone, 2),
        "mbPerS": round(size / alone),
        **json.loads(output),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=2_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--push", type=Path)
    options = parser.parse_args()
    if options.push is not None:
        asyncio.run(push(options.push))
        return
    root = Path(tempfile.mkdtemp(prefix="pysync-erasure-"))
    try:
        folder = root / "data"
        asyncio.run(create(folder))
        fill(folder, options.documents, options.bytes)
        for number in range(options.runs):
            print(json.dumps(run(folder, number)), flush=True)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
