"""Projections: lists that the server keeps from the writes of other collections.

    spec      ProjectionSpec: sources, target and project, from code or from the configuration
    sources   the collections that keys belong to, and what is stored there now, as events
    lists     reads, folds and conditionally puts a list
    follower  the plugins: they follow the change log, with a checkpoint
    rebuild   makes lists anew

A list is folded from what its sources are when it is written, and not from what the change log says they
were: so changes may be folded twice, late, or by two processes at once, and the list comes out the same.

See docs/reference/protocol.md#projected-lists.
"""

from pysync.plugins.projection.follower import (
    Projection,
    ProjectionsPlugin,
    projections_in,
    projections_of,
    projections_plugins_in,
)
from pysync.plugins.projection.spec import Project, ProjectionSpec, Target

__all__ = [
    "Project",
    "Projection",
    "ProjectionSpec",
    "ProjectionsPlugin",
    "Target",
    "projections_in",
    "projections_of",
    "projections_plugins_in",
]
