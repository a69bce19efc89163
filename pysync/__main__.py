"""`python -m pysync` is `pysync`."""

import sys

from pysync.cli import main

sys.exit(main())
