"""The command line of long runs."""

import argparse
import asyncio
import secrets
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp

import components

from proof.nodes import Nodes, machines_on_s3, workers_on_a_folder
from proof.run import prove
from proof.verdict import Verdict

BUILD = Path(__file__).parents[2] / "target"


def main() -> int:
    options = _arguments()
    print(f"seed {options.seed}, history in {options.history}", flush=True)
    BUILD.mkdir(exist_ok=True)
    folder = Path(mkdtemp(prefix="proof-", dir=BUILD))
    with ExitStack() as stack:
        verdict = asyncio.run(_run(_nodes(options, folder, stack), options))
    print(verdict)
    if verdict.violations:
        print(f"what the nodes stored and logged is in {folder}")
        return 1
    rmtree(folder)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.proof", description="Load many nodes, kill some of them, judge what they told."
    )
    parser.add_argument(
        "--nodes",
        choices=("file", "s3"),
        required=True,
        help="four workers on a folder, or three on S3 and Redis",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they are asked (default: 60)")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbits(32), help="of what is asked and what fails"
    )
    parser.add_argument(
        "--history", type=Path, default=BUILD / "proof.jsonl", help="where all that was told is kept"
    )
    return parser.parse_args()


def _nodes(options: argparse.Namespace, folder: Path, stack: ExitStack) -> AbstractAsyncContextManager[Nodes]:
    """The nodes that are asked for; what they need runs until `stack` ends."""
    if options.nodes == "file":
        return workers_on_a_folder(folder)
    (folder / "s3").mkdir()
    s3 = stack.enter_context(components.radosgw(folder / "s3"))
    redis = stack.enter_context(components.redis_server(folder))
    return machines_on_s3(folder, s3, redis, Random(options.seed))


async def _run(nodes: AbstractAsyncContextManager[Nodes], options: argparse.Namespace) -> Verdict:
    async with nodes as started:
        return await prove(started, options.history, seconds=options.seconds, seed=options.seed)
