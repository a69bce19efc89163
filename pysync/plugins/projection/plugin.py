"""The plugins that keep lists, and how they are found among the plugins of a service."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property

from pysync.config import Config, ConfigError, Problem
from pysync.errors import Unavailable
from pysync.plugins import PluginContext
from pysync.plugins.projection.follower import ProjectionWorker
from pysync.plugins.projection.spec import ProjectionSpec, spec_from_config


class ProjectionsPlugin:
    """The plugin that keeps the lists of several projections. Its name identifies the checkpoint."""

    def __init__(self, name: str, projections: Sequence[ProjectionSpec]) -> None:
        self.name = name
        self.projections = tuple(projections)
        self._worker: ProjectionWorker | None = None

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        """Follow the change log while the service runs."""
        self._worker = follower = ProjectionWorker(self.name, self.projections, services)
        try:
            yield
        finally:
            self._worker = None
            await follower.close()

    async def wait_until_folded(self, change_id: str) -> None:
        """Return once the lists contain all changes up to `change_id`. Raises Unavailable."""
        if self._worker is None:
            raise Unavailable
        await self._worker.wait_until_folded(change_id)


class Projection(ProjectionSpec):
    """A projection that is a plugin by itself: `create_app(..., plugins=[Projection(...)])`."""

    @cached_property
    def plugin(self) -> ProjectionsPlugin:
        """Return the plugin that keeps its list."""
        return ProjectionsPlugin(self.name, [self])

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        """Keep the list while the service runs."""
        async with self.plugin.lifespan(services):
            yield


def projections_of(config: Config) -> Sequence[ProjectionsPlugin]:
    """Return the plugin for the projections that the configuration declares; empty without any. Raises
    ConfigError with all problems of the code that they name."""
    made, problems = [], []
    for at, said in enumerate(config.projections):
        try:
            made.append(spec_from_config(said))
        except ValueError as error:
            problems.append(Problem(f"projections[{at}]", str(error)))
    if problems:
        raise ConfigError(problems)
    return (ProjectionsPlugin("projections", made),) if made else ()


def projections_in(plugins: Iterable[object]) -> list[ProjectionSpec]:
    """Return the projections among these plugins."""
    found: list[ProjectionSpec] = []
    for plugin in plugins:
        if isinstance(plugin, ProjectionsPlugin):
            found += plugin.projections
        elif isinstance(plugin, Projection):
            found.append(plugin)
    return found


def projections_plugins_in(plugins: Iterable[object]) -> list[ProjectionsPlugin]:
    """Return those of these plugins that keep lists."""
    return [
        plugin if isinstance(plugin, ProjectionsPlugin) else plugin.plugin
        for plugin in plugins
        if isinstance(plugin, ProjectionsPlugin | Projection)
    ]
