"""A long run: `python -m tests.proof --nodes s3 --seconds 300`. Exit status 1 where a promise is not kept."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from proof.command import main

if __name__ == "__main__":
    sys.exit(main())
