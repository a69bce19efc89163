"""Windows of Chromium, driven through the DevTools protocol over one WebSocket."""

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import aiohttp
import pytest_asyncio

WAIT_S: Final = 30.0


@pytest_asyncio.fixture
async def screen(chromium: str) -> AsyncIterator["Chromium"]:
    """A browser, in whose windows no page complained while the test ran."""
    async with driven(chromium) as screen:
        yield screen
        assert screen.complaints == []


@pytest_asyncio.fixture
async def other_screen(chromium: str) -> AsyncIterator["Chromium"]:
    """The same for somebody else, in whose browser nothing is stored that `screen` has."""
    async with driven(chromium) as screen:
        yield screen
        assert screen.complaints == []


class Killed(Exception):
    """The window was killed before it replied."""


class Chromium:
    """One connection to a browser. What opens in it has storage of its own, and ends with it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._windows: dict[str, Window] = {}
        self.context = ""

    async def call(self, method: str, session: str = "", **params: Any) -> Any:
        """The result of a method of the protocol. Raises RuntimeError where the browser refuses it,
        and Killed where the window of the session is killed meanwhile."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        reply = asyncio.get_running_loop().create_future()
        self._replies[number] = session, reply
        await self._socket.send_json(message)
        return await reply

    async def open(self, url: str, before: str = "") -> "Window":
        """A new window with the page at `url`, when it has loaded. The script `before` runs in each page of
        the window before the page's own."""
        context = {"browserContextId": self.context} if self.context else {}
        target = await self.call("Target.createTarget", url="about:blank", newWindow=True, **context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        window = Window(self, target["targetId"], attached["sessionId"])
        self._windows[attached["sessionId"]] = window
        if before:
            await self.call("Page.enable", attached["sessionId"])
            await self.call("Page.addScriptToEvaluateOnNewDocument", attached["sessionId"], source=before)
        await window.load(url)
        return window

    @property
    def complaints(self) -> list[str]:
        """What the windows have complained about."""
        return [complaint for window in self._windows.values() for complaint in window.complaints]

    async def listen(self) -> None:
        """Take what the browser says, until it says no more."""
        async for said in self._socket:
            message = json.loads(said.data)
            if "id" in message:
                _, reply = self._replies.pop(message["id"], ("", None))
                if reply is None or reply.done():
                    continue
                if "error" in message:
                    reply.set_exception(RuntimeError(message["error"]["message"]))
                else:
                    reply.set_result(message["result"])
            elif message.get("sessionId") in self._windows:
                if message["method"] == "Inspector.targetCrashed":
                    self._on_kill(message["sessionId"])
                self._windows[message["sessionId"]].on_event(message["method"], message["params"])

    def _on_kill(self, killed: str) -> None:
        """End the calls that the killed window will not reply to."""
        for number, (session, reply) in list(self._replies.items()):
            if session == killed:
                del self._replies[number]
                if not reply.done():
                    reply.set_exception(Killed())


class Window:
    """One window. `complaints` are uncaught exceptions and whatever else its page has on its console as an
    error; that a request failed, or was refused, is not among them: every browser says so itself."""

    def __init__(self, chromium: Chromium, target: str, session: str) -> None:
        self._chromium = chromium
        self._target = target
        self._session = session
        self._loaded = asyncio.Event()
        self._on_report: Callable[[Any], None] = lambda value: None
        self.complaints: list[str] = []

    async def load(self, url: str) -> None:
        """Go to `url`, and return when the page is there."""
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        # As if it were in front, which only one of several windows is.
        await self._call("Emulation.setFocusEmulationEnabled", enabled=True)
        self._loaded.clear()
        await self._call("Page.navigate", url=url)
        await self._loaded.wait()

    async def report_to(self, on_report: Callable[[Any], None]) -> None:
        """Call `on_report` with each value that the page gives to its function `report`, also if the page is
        killed right afterwards."""
        self._on_report = on_report
        await self._call("Runtime.addBinding", name="reportText")
        await self.run("window.report = (value) => reportText(JSON.stringify(value))")

    async def close(self) -> None:
        """Close the window, as its user would."""
        await self._chromium.call("Target.closeTarget", targetId=self._target)

    async def kill(self) -> None:
        """End the process that runs the page, wherever it is, and the window. No handler of the page runs."""
        with suppress(Killed):
            await self._call("Page.crash")
        await self.close()

    async def run(self, script: str, *values: Any) -> Any:
        """The value of an expression in the page, or what its promise comes to. With `values`, which JSON can
        hold, the expression is a function that is called with them."""
        if values:
            script = f"({script})({', '.join(json.dumps(value) for value in values)})"
        done = await self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in done:
            raise AssertionError(done["exceptionDetails"]["exception"].get("description", done))
        return done["result"].get("value")

    async def until(self, condition: str) -> None:
        """Return when an expression, or what its promise comes to, is true in the page. Raises AssertionError
        where that takes too long."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self.run(
                    f"(async () => {{ while (!await ({condition}))"
                    " await new Promise((resolve) => setTimeout(resolve, 10)) })()"
                )
        except TimeoutError:
            shown = await self.run(
                "[document.body.innerText, ...Array.from("
                "document.querySelectorAll('input, textarea'), (box) => box.value)].join('\\n')"
            )
            raise AssertionError(f"still not {condition} in:\n{shown}") from None

    async def go_offline(self, is_offline: bool = True) -> None:
        """Have requests of the page fail as without a network, or no longer; those of a service worker do
        not."""
        await self._call("Network.enable")
        await self._call(
            "Network.emulateNetworkConditions",
            offline=is_offline, latency=0, downloadThroughput=-1, uploadThroughput=-1,
        )  # fmt: skip

    async def limit_storage(self, size: int | None) -> None:
        """Let the origin of the page store so many bytes, or as many as usual. A limit counts if it is set
        before the page stores anything: the browser remembers for long how much room it has found."""
        origin = await self.run("location.origin")
        limit = {} if size is None else {"quotaSize": size}
        await self._call("Storage.overrideQuotaForOrigin", origin=origin, **limit)

    async def evict_storage(self) -> None:
        """Delete what the origin of the page has stored, as a browser does that needs the space."""
        origin = await self.run("location.origin")
        await self._call("Storage.clearDataForOrigin", origin=origin, storageTypes="indexeddb")

    async def show_as(self, width: int, height: int, scheme: str = "light") -> None:
        """Give the window a size, in pixels, and the colours that its user prefers: `light` or `dark`."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self._call("Emulation.setDeviceMetricsOverride", **screen)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self._call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self) -> bytes:
        """The picture in the window, as PNG."""
        return base64.b64decode((await self._call("Page.captureScreenshot", format="png"))["data"])

    async def type(self, text: str) -> None:
        """Type `text` where the cursor is."""
        await self._call("Input.insertText", text=text)

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, such as `Tab`, 9."""
        key_of = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        await self._call("Input.dispatchKeyEvent", type="keyDown", **key_of)
        await self._call("Input.dispatchKeyEvent", type="keyUp", **key_of)

    async def compose(self, text: str) -> None:
        """Have `text` shown where the cursor is, as an input method does before the next `type` ends it."""
        await self._call(
            "Input.imeSetComposition", text=text, selectionStart=len(text), selectionEnd=len(text)
        )

    async def controls(self) -> list[tuple[str, str]]:
        """What can be used in the page, as it is read to those who do not see it: roles and names."""
        tree = await self._call("Accessibility.getFullAXTree")
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree["nodes"]
            if not node["ignored"] and node["role"]["value"] in ("button", "link", "searchbox", "textbox")
        ]

    def on_event(self, event: str, params: dict[str, Any]) -> None:
        """Take an event of the browser's."""
        if event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Runtime.bindingCalled":
            self._on_report(json.loads(params["payload"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str(params["args"]))
        elif event == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] == "error" and entry["source"] != "network":
                self.complaints.append(str(entry))

    async def _call(self, method: str, **params: Any) -> Any:
        return await self._chromium.call(method, self._session, **params)


@asynccontextmanager
async def driven(url: str, *, is_private: bool = True) -> AsyncIterator[Chromium]:
    """The browser whose WebSocket is at `url`; its windows are closed at the end. Unless it `is_private`, its
    windows store what they have to on the disk, in the profile of the browser."""
    async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
        chromium = Chromium(socket)
        listening = asyncio.create_task(chromium.listen())
        try:
            if not is_private:
                yield chromium
                return
            made = await chromium.call("Target.createBrowserContext", disposeOnDetach=True)
            chromium.context = made["browserContextId"]
            yield chromium
            await chromium.call("Target.disposeBrowserContext", browserContextId=chromium.context)
        finally:
            listening.cancel()
