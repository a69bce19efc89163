"""`pysync copy` and `pysync verify`: every object of a store is checked, and copied to another one.

locations        the stores that arguments name, opened
copier           each object from the one to the other, the segments of a log before its head
reading          one object that cannot be read is skipped; a store out of reach is not
verify           checks of one object, and of everything that a store holds
starfish_folder  the folder of a Starfish server, as a source
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
