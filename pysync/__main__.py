"""`python -m pysync` is `pysync`."""

import sys

from pysync.cli.main import main

sys.exit(main())
