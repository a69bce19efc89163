"""Erasure: removes what belongs to a key, a prefix or an identity, so that no byte of it is left.

    scope      what is to be erased, and the keys that belong to it
    plan       what goes with a page of these keys, and the report
    record     what was erased, for backups
    eraser     the steps, in their order

See docs/how-to/erase-a-person.md.
"""

from pysync.erase.eraser import Eraser
from pysync.erase.plan import EraseReport
from pysync.erase.scope import EraseRequest

__all__ = ["EraseReport", "EraseRequest", "Eraser"]
