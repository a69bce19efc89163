"""pysync: a self-hosted HTTP service that keeps documents in sync for applications."""

from pysync import _build, _core

__version__ = _core.VERSION.replace("-", ".")  # Cargo spells 0.2.0.dev0 as 0.2.0-dev0

_build.check(_core.SOURCE_DIGEST)
