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

from collections.abc import Iterable, Sequence

from pysync.config import Config, ConfigError, Problem
from pysync.plugins.projection.follower import Projections
from pysync.plugins.projection.spec import Project, Projection, Target, declared

__all__ = ["Project", "Projection", "Projections", "Target", "keepers_in", "projections_in", "projections_of"]


def projections_of(config: Config) -> Sequence[Projections]:
    """The plugin that keeps the lists which the configuration declares; none where it declares none. Raises
    ConfigError with all that is wrong with the code that it names."""
    made, problems = [], []
    for at, said in enumerate(config.projections):
        try:
            made.append(declared(said))
        except ValueError as error:
            problems.append(Problem(f"projections[{at}]", str(error)))
    if problems:
        raise ConfigError(problems)
    return (Projections("projections", made),) if made else ()


def projections_in(plugins: Iterable[object]) -> list[Projection]:
    """The projections among some plugins."""
    found: list[Projection] = []
    for plugin in plugins:
        if isinstance(plugin, Projections):
            found += plugin.projections
        elif isinstance(plugin, Projection):
            found.append(plugin)
    return found


def keepers_in(plugins: Iterable[object]) -> list[Projections]:
    """Those among some plugins who keep lists."""
    return [
        plugin if isinstance(plugin, Projections) else plugin.keeper
        for plugin in plugins
        if isinstance(plugin, Projections | Projection)
    ]
