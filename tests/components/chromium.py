"""Chromium, without a screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from components.processes import Process, program

# It asks nobody for updates, lists or time, and treats windows that nobody sees like the one in front.
_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--remote-debugging-address=127.0.0.1",
    "--remote-debugging-port=0",
)


@contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """A Chromium with its files in `folder`, which should be empty: the URL of the WebSocket through which it
    is driven, in the words of the DevTools protocol."""
    port_file = folder / "DevToolsActivePort"
    command = [program("chromium"), *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    # Some of its files go to the home of its user, whatever it is told.
    process = Process(
        [program("env"), "-u", "XDG_CONFIG_HOME", f"HOME={folder}", *command], folder / "chromium.out"
    )
    try:
        process.wait_until(lambda: port_file.read_text().count("\n") > 0)
        port, path = port_file.read_text().splitlines()
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        process.stop()
