"""Every bench of this checkout alone, one after the other, each in its own process: what `make bench` prints.

python benches/run.py [--quick]

RESULTS.md says which command makes which row.
"""

import subprocess
import sys

from benches.servers import CHECKOUT

BENCHES = (
    "benches.core",
    "benches.compare",
    "benches.workers",
    "benches.append_log",
    "benches.start",
    "benches.streams",
    "benches.files",
    "benches.events",
    "benches.quotas",
    "benches.returning",
    "benches.browser",
    "benches.backup",
    "benches.follower",
    "benches.s3",
)


def main() -> int:
    for bench in BENCHES:
        print(f"\n# {bench}\n", flush=True)
        done = subprocess.run([sys.executable, "-m", bench, *sys.argv[1:]], cwd=CHECKOUT, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
