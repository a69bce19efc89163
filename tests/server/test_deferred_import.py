"""The server does without the client of aiohttp, and whoever uses the client gets it."""

import json
import py_compile
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process


def run(script: str) -> Any:
    """Run `script` in a new interpreter and return what it prints."""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def test_the_client_of_aiohttp_is_loaded_when_it_is_used() -> None:
    found = run(
        "import json, sys, pysync.server.serve\n"
        "before = 'aiohttp.client' in sys.modules\n"
        "import aiohttp\n"
        "print(json.dumps([before, aiohttp.__version__, aiohttp.ClientSession.__module__]))"
    )
    assert found == [False, version("aiohttp"), "aiohttp.client"]


def test_names_of_aiohttp_can_be_imported_after_the_server() -> None:
    found = run(
        "import json, pysync.server.serve\n"
        "from aiohttp import ClientSession, StreamReader, hdrs, web\n"
        "from pysync.server.web import BaseRequest\n"
        "print(json.dumps([web.BaseRequest is BaseRequest, hdrs.HOST, StreamReader.__module__]))"
    )
    assert found == [True, "Host", "aiohttp.streams"]


def test_a_name_that_aiohttp_does_not_have_is_an_attribute_error() -> None:
    found = run(
        "import json, pysync.server.serve, aiohttp\n"
        "print(json.dumps([hasattr(aiohttp, name) for name in ('Nothing', 'Nothing', 'ClientSession')]))"
    )
    assert found == [False, False, True]


def test_a_module_of_aiohttp_is_loaded_when_it_is_used() -> None:
    found = run(
        "import json, sys, pysync.server.serve, aiohttp\n"
        "print(json.dumps([aiohttp.connector.TCPConnector.__name__, 'aiohttp.cookiejar' in sys.modules]))"
    )
    assert found == ["TCPConnector", False]


def test_aiohttp_that_is_loaded_already_stays_as_it_is() -> None:
    found = run(
        "import json, aiohttp\n"
        "session = aiohttp.ClientSession\n"
        "import pysync.server.serve\n"
        "print(json.dumps([aiohttp.ClientSession is session]))"
    )
    assert found == [True]


def test_aiohttp_without_its_source_is_loaded_as_ever(tmp_path: Path) -> None:
    (tmp_path / "aiohttp").mkdir()
    (tmp_path / "module.py").write_text('__version__ = "4"\n')
    py_compile.compile(f"{tmp_path}/module.py", cfile=f"{tmp_path}/aiohttp/__init__.pyc")
    found = run(
        f"import json, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import pysync.server, aiohttp\n"
        "print(json.dumps([aiohttp.__version__]))"
    )
    assert found == ["4"]
