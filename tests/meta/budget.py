"""How many modules a request may pass through, how many thresholds there may be, and which private names.

A new capability may raise a number, in a commit of its own that says who needs it. Lower a number when what
it counts falls.
"""

from typing import Final

WALKS: Final = {
    "public pull": 11,
    "signed pull": 15,
    "signed push": 23,
    "append": 25,
    "file push": 26,
    "batch pull": 13,
}
"""Modules of pysync that a request of each kind passes through (`python -m support.request_walks`)."""

CONSTANTS: Final = 331
"""Numeric constants at module level of pysync: limits, periods, sizes, shares."""

PRIVATE_NAMES: Final = {
    "_max_msg_queue_size": "a connection with many requests in advance goes on reading them",
}
"""Private names of aiohttp that pysync uses, and what each gains. aiohttp may change them in any version."""
