"""Erasure: removes what belongs to a key, a prefix or an identity, so that no byte of it is left.

    request    what is to be erased
    scope      the keys that belong to it
    plan       what goes with a page of these keys: objects of logs, entries of lists
    journal    the unfinished erasures, in the store
    keyrings   entries of keyrings
    eraser     the steps, in their order

See docs/how-to/erase-a-person.md.
"""

from pysync.erase.eraser import Eraser
from pysync.erase.plan import EraseReport
from pysync.erase.request import EraseRequest

__all__ = ["EraseReport", "EraseRequest", "Eraser"]
