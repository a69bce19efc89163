"""Imports of aiohttp without its client, until something needs the client.

`import aiohttp` loads the client, and with it the certificates of every authority that the machine trusts. To
a server that sends no requests this is a fifth of the time to start, and a twelfth of its memory.
"""

import re
import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec

_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def defer_aiohttp() -> None:
    """Let `import aiohttp.x` load that module, and not the whole package before it. The package is loaded
    when one of its own names is first used, such as `aiohttp.ClientSession`. Does nothing if it is loaded
    already, has no source, or is a new version that is not as expected."""
    spec = None if "aiohttp" in sys.modules else find_spec("aiohttp")
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        return
    # Its modules import the version from the package.
    version = _VERSION.search(spec.loader.get_source("aiohttp") or "")
    if version is None:
        return
    loader, package = spec.loader, module_from_spec(spec)

    def load(name: str) -> object:
        if find_spec(f"aiohttp.{name}") is not None:
            return import_module(f"aiohttp.{name}")
        loader.exec_module(package)  # which has a `__getattr__` of its own
        return getattr(package, name)

    package.__dict__.update(__version__=version[1], __getattr__=load)
    sys.modules["aiohttp"] = package
