"""How long a newcomer waits: from `git clone` of the last commit to the first answer of `make serve`.

    python -m benches.first_answer

The package registries are asked as pip and cargo are set up here, so caches that are warm stay warm.
"""

import os
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from benches.servers import CHECKOUT, free_port

LIMIT_S = 600.0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


def main() -> int:
    with TemporaryDirectory() as folder:
        clone, port = Path(folder, "pysync"), free_port()
        started = time.monotonic()
        subprocess.run(["git", "clone", "--quiet", CHECKOUT, clone], check=True)
        environment = {**os.environ, "PYSYNC_SERVER_PORT": str(port)}
        made = subprocess.Popen(["make", "serve"], cwd=clone, env=environment, start_new_session=True)
        try:
            while not answers(f"http://127.0.0.1:{port}/health"):
                if made.poll() is not None or time.monotonic() - started > LIMIT_S:
                    print("`make serve` does not answer")
                    return 1
                time.sleep(0.05)
            elapsed_s = time.monotonic() - started
        finally:
            if made.poll() is None:
                os.killpg(made.pid, signal.SIGTERM)
            made.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    took = f"{elapsed_s:.0f} s, {cpu_s:.0f} s of CPU on {os.cpu_count()} cores"
    print(f"from git clone to the first answer: {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
