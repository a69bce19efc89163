"""The plugin that keeps lists, and those among a service's plugins that do."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property

from pysync.config import Config, ConfigError, Problem
from pysync.errors import Unavailable
from pysync.plugins import Services
from pysync.plugins.projection.follower import Follower
from pysync.plugins.projection.spec import ProjectionSpec, declared


class Projections:
    """Keeps the lists of several projections: a plugin. Each name names another checkpoint."""

    def __init__(self, name: str, projections: Sequence[ProjectionSpec]) -> None:
        self.name = name
        self.projections = tuple(projections)
        self._follower: Follower | None = None

    @asynccontextmanager
    async def lifespan(self, services: Services) -> AsyncIterator[None]:
        """Follow the change log while the service runs."""
        self._follower = follower = Follower(self.name, self.projections, services)
        try:
            yield
        finally:
            self._follower = None
            await follower.close()

    async def reached(self, place: str) -> None:
        """Return when the lists hold what was announced up to the id `place`. Raises Unavailable."""
        if self._follower is None:
            raise Unavailable
        await self._follower.reached(place)


class Projection(ProjectionSpec):
    """One projection that is a plugin by itself: `create_app(..., plugins=[Projection(...)])`."""

    @cached_property
    def keeper(self) -> Projections:
        """The keeper of its lists, if the plugin keeps them by itself."""
        return Projections(self.name, [self])

    @asynccontextmanager
    async def lifespan(self, services: Services) -> AsyncIterator[None]:
        """Keep the list while the service runs."""
        async with self.keeper.lifespan(services):
            yield


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


def projections_in(plugins: Iterable[object]) -> list[ProjectionSpec]:
    """The projections among some plugins."""
    found: list[ProjectionSpec] = []
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
