"""Runs the `pysync` command for `python -m pysync`."""

import sys

from pysync.cli.main import main

sys.exit(main())
