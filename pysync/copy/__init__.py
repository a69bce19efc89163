"""Everything that one store holds, in another: what is read is verified, what is there already passed over.

places   which store an argument means, opened
copier   each object from the one to the other, what a log's head names before the head
reading  one object that cannot be read is skipped, a store out of reach is not
sound    whether an object is what it should be
"""

from pysync.copy.copier import Copier, Outcomes
from pysync.copy.places import Place, open_source, open_target, place

__all__ = ["Copier", "Outcomes", "Place", "open_source", "open_target", "place"]
