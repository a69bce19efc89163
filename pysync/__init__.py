"""pysync: a self-hosted HTTP service that keeps documents in sync for applications."""

from pysync import _build, _core

__version__ = _core.VERSION

_build.check(_core.SOURCE_DIGEST)
