"""`pysync copy` and `pysync verify`: check every object of a store, and copy it to another store."""

from pysync.migrate.copier import Copier, CopyReport
from pysync.migrate.locations import Location, open_source, open_target, parse_location
from pysync.migrate.reading import SCRUB_KEY
from pysync.migrate.verify import Damage, VerificationReport, Verifier

__all__ = [
    "SCRUB_KEY",
    "Copier",
    "CopyReport",
    "Damage",
    "Location",
    "VerificationReport",
    "Verifier",
    "open_source",
    "open_target",
    "parse_location",
]
