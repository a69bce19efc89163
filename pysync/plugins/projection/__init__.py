"""Projections: lists that the server keeps from the writes of other collections (service, Projection).

    definition  Projection: sources, target and project, from code
    declared    the same, from the configuration
    keys        which keys belong to which collections
    sources     what is stored now, as events
    folding     lists as text: what steps make of one
    lists       reads, folds and conditionally puts a list
    follower    follows the change log, with a checkpoint; the plugin
    rebuild     makes lists anew

A list is folded from what its sources are when it is written, and not from what the change log says they
were: so changes may be folded twice, late, or by two processes at once, and the list comes out the same.
"""

from collections.abc import Sequence

from pysync.config import Config
from pysync.plugins.projection.declared import declared
from pysync.plugins.projection.definition import Project, Projection, Target
from pysync.plugins.projection.follower import Projections

__all__ = ["Project", "Projection", "Projections", "Target", "projections_of"]


def projections_of(config: Config) -> Sequence[Projections]:
    """The plugin that keeps the lists which the configuration declares; none where it declares none. Raises
    ValueError where it names code that is not there."""
    if not config.projections:
        return ()
    return (Projections("projections", [declared(said) for said in config.projections]),)
