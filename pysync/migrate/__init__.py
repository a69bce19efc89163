"""`pysync copy` and `pysync verify`: every object of a store is checked, and copied to another one.

locations        the stores that arguments name, opened
copier           each object from the one to the other, the segments of a log before its head
reading          one object that cannot be read is skipped; a store out of reach is not
verify           checks of one object, and of everything that a store holds
starfish_folder  the folder of a Starfish server, as a source
"""

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
