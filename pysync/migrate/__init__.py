"""`pysync copy` and `pysync verify`: every object of a store is checked, and copied to another one.

places   which store an argument means, opened
copier   each object from the one to the other, what a log's head names before the head
reading  one object that cannot be read is skipped, a store out of reach is not
sound    whether an object is what it should be
verifier everything that a store holds, checked where it lies
"""

from pysync.migrate.copier import Copier, Outcomes
from pysync.migrate.locations import Place, open_source, open_target, place
from pysync.migrate.reading import SCRUBBED
from pysync.migrate.verify import Damage, Verified, Verifier

__all__ = [
    "SCRUBBED",
    "Copier",
    "Damage",
    "Outcomes",
    "Place",
    "Verified",
    "Verifier",
    "open_source",
    "open_target",
    "place",
]
