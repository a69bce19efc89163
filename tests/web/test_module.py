"""The browser client is one module that a page imports from the server."""

import pytest
from support.browser import Chromium
from support.clients import Start
from support.collections import NOTES
from support.web_pages import module, web_service


@pytest.mark.parametrize("mount", ["", "/v1"])
async def test_page_imports_the_module_from_the_server(start: Start, screen: Chromium, mount: str) -> None:
    base = await web_service(start, NOTES, server={"mountPath": mount})
    window = await module(screen, base)
    assert await window.run("typeof pysync.IdentityKeys") == "function"
    assert await window.run("(a, b) => a + b", 1, 2) == 3
