"""Projections: lists that the server keeps from the writes of other collections
(docs/reference/protocol.md#projected-lists).

A list is folded from the state of its sources when it is written, not from that in the change log. Changes
may therefore be folded twice, late, or by two processes at once, and the list comes out the same.
"""

from pysync.plugins.projection.follower import (
    Projection,
    ProjectionsPlugin,
    projections_in,
    projections_of,
    projections_plugins_in,
)
from pysync.plugins.projection.spec import Project

__all__ = [
    "Project",
    "Projection",
    "ProjectionsPlugin",
    "projections_in",
    "projections_of",
    "projections_plugins_in",
]
