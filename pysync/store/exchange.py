"""Two folders that change places in one step: whoever looks sees one or the other, and never none."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from pysync.store import MergeRefused

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_CANNOT: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)


def exchange(one: Path, other: Path) -> None:
    """Give each of two folders the other's name. Raises MergeRefused where kernel or file system cannot,
    OSError where something else is wrong."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise MergeRefused("this system's C library has no renameat2") from None
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    error = OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))
    if number in _CANNOT:
        raise MergeRefused(f"the file system of {other} cannot exchange two folders in one step") from error
    raise error
