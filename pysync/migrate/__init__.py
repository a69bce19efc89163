"""`pysync copy`, `pysync verify` and `pysync gc`: copy every object of a store to another, check it, and
delete what nothing leads to."""

from pysync.migrate.copier import Copier, CopyReport
from pysync.migrate.garbage import MIN_GRACE_MS, GarbageCollector
from pysync.migrate.locations import open_source, open_target, parse_location
from pysync.migrate.reading import SCRUB_KEY, VERIFY_KEY
from pysync.migrate.verify import Damage, VerificationReport, Verifier

__all__ = [
    "MIN_GRACE_MS",
    "SCRUB_KEY",
    "VERIFY_KEY",
    "Copier",
    "CopyReport",
    "Damage",
    "GarbageCollector",
    "VerificationReport",
    "Verifier",
    "open_source",
    "open_target",
    "parse_location",
]
