"""How many modules a request may pass through, how many thresholds there may be, and which private names.

A new capability may raise a number, in a commit of its own that says who needs it. Lower a number when what
it counts falls.
"""

from typing import Final

WALKS: Final = {
    "public pull": 12,
    "signed pull": 16,
    "signed push": 22,
    "append": 24,
    "file push": 25,
    "batch pull": 15,
}
"""Modules of pysync that a request of each kind passes through (`python -m support.request_walks`)."""

CONSTANTS: Final = 400
"""Numeric constants at module level of pysync: limits, periods, sizes, shares."""

PRIVATE_NAMES: Final = {
    **dict.fromkeys(
        ("_eof_sent", "_keep_alive", "_req", "_status"),
        "a response is written by one call, without the headers, tasks and checks of aiohttp's",
    ),
    **dict.fromkeys(
        ("_current_request", "_keepalive_timeout", "_manager", "_process_keepalive", "_request_handler"),
        "idle connections give way to new ones, and those with a request under way do not",
    ),
    **dict.fromkeys(
        (
            "_ErrInfo",
            "_buffer_paused",
            "_close",
            "_force_close",
            "_handle_request",
            "_keepalive",
            "_keepalive_handle",
            "_kwargs",
            "_loop",
            "_make_error_handler",
            "_max_msg_queue_size",
            "_messages",
            "_msg_queue_resume_size",
            "_next_keepalive_close_time",
            "_parser",
            "_pause_transport_reading",
            "_paused",
            "_reading_paused",
            "_request_in_progress",
            "_resume_reading_if_drained",
            "_resume_transport_reading",
            "_task_handler",
            "_upgraded",
            "_waiter",
        ),
        "requests wait for their turn in one queue of the process, in place of a task for each connection",
    ),
}
"""Private names of aiohttp that pysync uses, and what each gains. aiohttp may change them in any version."""
