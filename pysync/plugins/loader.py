"""Load the plugins that a configuration names, and check that they are plugins. A misspelled hook is an
error, because it would never be called and the mistake would stay unnoticed.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, get_args

from pysync.auth.certificates import Kind
from pysync.config import Collection, Config, ConfigError, Problem
from pysync.config import key_templates as templates
from pysync.plugins import FileBackedCollection
from pysync.plugins.hooks import implements

GROUP: Final = "pysync.plugins"
"""The group of entry points that name plugins."""

_ASYNC: Final = {
    "authorize": "request",
    "before_pull": "request",
    "intercept_pull": "request",
    "intercept_push": "push",
    "before_delete": "request",
    "after_write": "event",
    "after_delete": "event",
}
"""The hooks that wait, and what each is given."""
HOOKS: Final = (*_ASYNC, "lifespan", "cap_validators", "stored_files")
"""Every hook."""
_SIMILARITY: Final = 0.8
"""Similarity of two names, from 0 to 1, above which one counts as a misspelling of the other."""


def load_plugins(config: Config, given: Sequence[object] = ()) -> tuple[object, ...]:
    """Return the plugins `given`, followed by those that `config` names, checked. Raises ConfigError with all
    problems of all plugins."""
    problems: list[Problem] = []
    plugins = [(f"create_app: plugins[{at}]", plugin) for at, plugin in enumerate(given)]
    for at, reference in enumerate(config.plugins):
        path = f"plugins[{at}]"
        try:
            plugins.append((path, _instantiate(_load_reference(reference))))
        except ValueError as error:
            problems.append(Problem(path, str(error)))
    first: dict[str, str] = {}
    for path, plugin in plugins:
        problems += [Problem(path, fault) for fault in _plugin_errors(plugin)]
        name = getattr(plugin, "name", None)
        if isinstance(name, str) and first.setdefault(name, path) != path:
            problems.append(Problem(path, f"{name!r} is also the name of {first[name]}"))
    problems += file_problems(config, plugins)
    if problems:
        raise ConfigError(problems)
    return tuple(plugin for _, plugin in plugins)


def file_problems(config: Config, plugins: Iterable[tuple[str, object]]) -> Iterator[Problem]:
    """Yield the problems of collections that are served from files of plugins, which are given with their
    paths."""
    owners: dict[str, str] = {}
    for path, plugin in plugins:
        for fault in _file_backed_errors(plugin, config, owners, path):
            yield Problem(path, fault)


def add_config_dir_to_path(file: str | os.PathLike[str]) -> None:
    """Find modules in the folder of a configuration file, too, after all others, so that none of them
    replaces a module of the server."""
    folder = str(Path(file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)


def import_object(reference: str) -> Any:
    """Return the object that `package.module:object` names. Raises ValueError if there is none."""
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"there is no module {error.name}") from None
        raise ValueError(f"{module_name} cannot be imported: {error}") from error
    except Exception as error:
        raise ValueError(f"{module_name} cannot be imported: {_describe(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        where = getattr(module, "__file__", None) or "it"
        raise ValueError(f"{module_name} has no {name}{_nearest(name, vars(module))} ({where})") from None


def _load_reference(reference: str) -> Any:
    if ":" in reference:
        return import_object(reference)
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    for entry in found.select(name=reference):
        try:
            return entry.load()
        except Exception as error:
            raise ValueError(f"the entry point {entry.value} cannot be loaded: {_describe(error)}") from error
    hint = _nearest(reference, dict.fromkeys(found.names))
    raise ValueError(f"no installed package has an entry point {reference} of the group {GROUP}{hint}")


def _instantiate(found: Any) -> Any:
    """Return the plugin that a class or function makes, or the object itself. Raises ValueError."""
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return found
    if inspect.iscoroutinefunction(found):
        raise ValueError(f"{found.__name__} is async: what makes a plugin does not wait")
    if not _accepts(found, 0):
        raise ValueError(f"{found.__name__} needs arguments: what makes a plugin takes none")
    try:
        return found()
    except Exception as error:
        raise ValueError(f"{found.__name__} made no plugin: {_describe(error)}") from error


def _plugin_errors(plugin: object) -> Iterator[str]:
    """Yield the reasons why an object is not a plugin."""
    name = getattr(plugin, "name", None)
    if not isinstance(name, str) or not name or not name.isprintable():
        yield f'{type(plugin).__name__} has no name: give it one, name = "..."'
    yield from _misspelled_hooks(plugin)
    hooks = [hook for hook in HOOKS if implements(plugin, hook)]
    if not hooks:
        yield f"{type(plugin).__name__} has no hook: one or more of {', '.join(HOOKS)}"
    for hook in hooks:
        value = getattr(plugin, hook)
        if hook == "cap_validators":
            yield from _validator_errors(value)
        elif hook == "stored_files":
            continue  # what they are depends on the configuration
        elif not callable(value):
            yield f"{hook} is not callable"
        elif hook == "lifespan":
            yield from _lifespan_errors(value)
        else:
            yield from _hook_errors(hook, value)


def _misspelled_hooks(plugin: object) -> Iterator[str]:
    """Yield the methods and mappings whose names nearly equal a hook."""
    for name in dir(plugin):
        if name.startswith("_") or name == "name" or name in HOOKS:
            continue
        value = inspect.getattr_static(plugin, name)
        if not (callable(value) or isinstance(value, classmethod | Mapping)):
            continue
        near = get_close_matches(_normalized(name), map(_normalized, HOOKS), n=1, cutoff=_SIMILARITY)
        if near:
            hook = next(hook for hook in HOOKS if _normalized(hook) == near[0])
            yield f"{name} is no hook; did you mean {hook}? (begin it with _ if it is none)"


def _hook_errors(hook: str, value: Callable[..., Any]) -> Iterator[str]:
    form = f"async def {hook}(self, {_ASYNC[hook]})"
    if not _is_async(value):
        yield f"{hook} must be async: {form}"
    if not _accepts(value, 1):
        yield f"{hook} takes the wrong arguments: {form}"


def _lifespan_errors(value: Callable[..., Any]) -> Iterator[str]:
    if _is_async(value) or inspect.isasyncgenfunction(value):
        yield "lifespan must return an asynchronous context manager: put @asynccontextmanager above it"
    if not _accepts(value, 1):
        yield "lifespan takes the wrong arguments: def lifespan(self, services)"


def _validator_errors(validators: object) -> Iterator[str]:
    if not isinstance(validators, Mapping):
        yield "cap_validators must be a mapping of kinds of certificates to functions"
        return
    kinds = get_args(Kind)
    for kind, validator in validators.items():
        if kind not in kinds:
            yield f"cap_validators: there is no kind {kind!r} of certificates, only {', '.join(kinds)}"
        elif not callable(validator):
            yield f"cap_validators: that of {kind} is not callable"
        elif _is_async(validator):
            yield f"cap_validators: that of {kind} must not be async"
        elif not _accepts(validator, 1):
            yield f"cap_validators: that of {kind} takes one argument, the certificate"


def _file_backed_errors(plugin: object, config: Config, owners: dict[str, str], path: str) -> Iterator[str]:
    """Yield the reasons why collections cannot be served from a plugin's files. `owners` maps collections to
    the plugins that already serve them."""
    if not implements(plugin, "stored_files"):
        return
    stored = getattr(plugin, "stored_files")  # noqa: B009 (no attribute of `object`)
    if not (
        isinstance(stored, Mapping)
        and all(isinstance(files, FileBackedCollection) for files in stored.values())
    ):
        yield "stored_files must be a mapping of names of collections to StoredFiles"
        return
    known = config.collections_by_name()
    for name, files in stored.items():
        if name not in known:
            yield f"stored_files: there is no collection {name!r}"
        if owners.setdefault(name, path) != path:
            yield f"stored_files: {owners[name]} keeps the files of {name!r} already"
        for fault in templates.errors(files.template):
            yield f"stored_files: the template of {name!r} {fault}"
        for collection in known.get(name, ()):
            for fault in _incompatible_settings(files, collection):
                yield f"stored_files: {name!r} {fault}"


def _incompatible_settings(files: FileBackedCollection, collection: Collection) -> Iterator[str]:
    """Yield the settings of a collection that do not work with a plugin's files."""
    if collection.append_only is not None or collection.bundle is not None:
        yield "is a log, or in a bundle"
    names, template = collection.path_template.params, templates.KeyTemplate.of(files.template)
    for param in template.params:
        if param not in names:
            yield f"has no path parameter {{{param}}}"
    is_last = template.ends_in_param and template.params[-1] == names[-1]
    if collection.listable and not (is_last and template.params.count(names[-1]) == 1):
        yield f"is listable: the template must end in {{{names[-1]}}}"


def _is_async(call: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def _accepts(call: Callable[..., Any], count: int) -> bool:
    """Return True if the function accepts this number of arguments, as far as its signature shows."""
    try:
        signature = inspect.signature(call)
    except (ValueError, TypeError):
        return True  # written in C
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _normalized(name: str) -> str:
    """Return a name in the form in which misspellings are compared: `afterWrite` is `after_write`."""
    return name.lower().replace("_", "")


def _nearest(name: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(name, [other for other in known if not other.startswith("_")], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
