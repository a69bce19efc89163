"""Server-sent events, read: bytes as they come, blocks as they are meant."""

import re
from typing import Final, NamedTuple

MAX_BLOCK_BYTES: Final = 1 << 20
_END_OF_LINE: Final = re.compile(rb"\r\n?|\n")
_BOM: Final = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """What stands between two blank lines, but for comments: the joined lines of its data (None: it has
    none), the name of its event (`""`: a message), and its id (None: it has none)."""

    data: str | None
    event: str
    id: str | None


class Blocks:
    """Reads the blocks of one connection. What the connection's end leaves unfinished is no block."""

    def __init__(self) -> None:
        self.retry_s = 0.0
        """How long the server asks to wait before the next connection; 0 where it does not say."""
        self._rest = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[str] = []
        self._data_size = 0
        self._event = ""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[Block]:
        """The blocks that end in `chunk`, however lines and characters are split between chunks; not those
        without data and id. Raises ValueError for one of more than MAX_BLOCK_BYTES."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the line ended with the chunk before
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._rest = _END_OF_LINE.split(self._rest + chunk)
        found = [block for line in lines if (block := self._line(line)) is not None]
        if len(self._rest) + self._data_size > MAX_BLOCK_BYTES:
            raise ValueError("an event is too long")
        return found

    def _line(self, line: bytes) -> Block | None:
        if self._at_start:
            line, self._at_start = line.removeprefix(_BOM), False
        if not line:
            return self._end()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        self._field(name, value.removeprefix(" "))
        return None

    def _field(self, name: str, value: str) -> None:
        match name:
            case "data":
                self._data.append(value)
                self._data_size += len(value) + 1
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if re.fullmatch("[0-9]{1,8}", value):
                self.retry_s = int(value) / 1000

    def _end(self) -> Block | None:
        block = Block("\n".join(self._data) if self._data else None, self._event, self._id)
        self._data, self._data_size, self._event, self._id = [], 0, "", None
        return None if block.data is None and block.id is None else block
