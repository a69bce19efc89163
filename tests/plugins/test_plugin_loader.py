"""Plugins as the configuration names them: found, made and checked."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.server_process import serving

from pysync.auth.certificates import Certificate
from pysync.config import ConfigError, parse
from pysync.model import WriteEvent
from pysync.plugins import Plugin, PluginContext, PluginRequest
from pysync.plugins.loader import add_config_dir_to_path, import_object, load_plugins

AUDIT = """
class Audit:
    name = "audit"
    async def after_write(self, event):
        pass

plugin = Audit()

def make():
    return Audit()

def make_by(what):
    return Audit()

async def make_late():
    return Audit()

def make_none():
    raise OSError("no such table")

async def authorize(request):
    return ()

name = "the module"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the Python path with a module `audits`; what is imported from it is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "audits.py").write_text(AUDIT)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def load(*references: str, given: tuple[object, ...] = ()) -> tuple[object, ...]:
    return load_plugins(parse({"plugins": list(references)}), given)


def faults(*references: str, given: tuple[object, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as rejected:
        load(*references, given=given)
    return [str(problem) for problem in rejected.value.problems]


def faults_of(plugin: object) -> list[str]:
    message = faults(given=(plugin,))
    prefix = "create_app: plugins[0]: "
    assert all(text.startswith(prefix) for text in message)
    return [text.removeprefix(prefix) for text in message]


@pytest.mark.parametrize("name", ["plugin", "Audit", "make"])
def test_an_object_a_class_or_a_function_is_named(name: str, folder: Path) -> None:
    (plugin,) = load(f"audits:{name}")
    assert type(plugin).__name__ == "Audit"
    (again,) = load(f"audits:{name}")
    assert (plugin is again) == (name == "plugin"), "what is made is made anew each time"


def test_plugins_come_in_the_order_in_which_they_are_named(folder: Path) -> None:
    (folder / "others.py").write_text(AUDIT.replace('"audit"', '"other"'))
    given = named("given")
    plugins = load("others:plugin", "audits:plugin", given=(given,))
    assert [getattr(plugin, "name", "") for plugin in plugins] == ["given", "other", "audit"]


def install(folder: Path, **entries: str) -> None:
    """What an installed package leaves of itself."""
    found = folder / "audits-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: audits\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (found / "entry_points.txt").write_text("\n".join(["[pysync.plugins]", *lines, ""]))


def test_an_entry_point_is_named(folder: Path) -> None:
    install(folder, audit="audits:Audit", broken="audits:Audits")
    (plugin,) = load("audit")
    assert type(plugin).__name__ == "Audit"
    assert faults("audits", "broken") == [
        "plugins[0]: no installed package has an entry point audits of the group pysync.plugins; "
        "did you mean audit?",
        "plugins[1]: the entry point audits:Audits cannot be loaded: AttributeError: "
        "module 'audits' has no attribute 'Audits'",
    ]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("audit:plugin", "there is no module audit"),
        ("audits.parts.more:plugin", "there is no module audits.parts"),
        ("nowhere.parts:plugin", "there is no module nowhere"),
        ("needy:plugin", "needy cannot be imported: No module named 'numbers_of'"),
        ("broken:plugin", "broken cannot be imported: SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("failing:plugin", "failing cannot be imported: ZeroDivisionError: division by zero"),
        ("audits:plugins", "audits has no plugins; did you mean plugin? ({folder}/audits.py)"),
        ("audits:make_by", "make_by needs arguments: what makes a plugin takes none"),
        ("audits:make_late", "make_late is async: what makes a plugin does not wait"),
        ("audits:make_none", "make_none made no plugin: OSError: no such table"),
    ],
)  # fmt: skip
def test_unloadable_plugin_is_reported(reference: str, message: str, folder: Path) -> None:
    (folder / "needy.py").write_text("import numbers_of")
    (folder / "broken.py").write_text("print(")
    (folder / "failing.py").write_text("1 / 0")
    assert faults(reference) == ["plugins[0]: " + message.format(folder=folder)]


def test_module_is_found_next_to_the_configuration_and_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("")
    (tmp_path / "found_beside.py").write_text("plugin = 1")
    add_config_dir_to_path(tmp_path / "config.json")
    add_config_dir_to_path(tmp_path / "config.json")
    assert sys.path.count(str(tmp_path)) == 1
    assert import_object("found_beside:plugin") == 1
    del sys.modules["found_beside"], sys.modules["json"]
    assert callable(import_object("json:loads"))


def named(name: object = "sample", **members: object) -> Any:
    """A plugin with `after_write`, unless that is among `members`."""

    async def after_write(event: WriteEvent) -> None: ...

    plugin = type("Sample", (), {})()
    vars(plugin).update({"name": name, "after_write": after_write, **members})
    return plugin


async def takes_request(request: PluginRequest) -> Any: ...


def waits_not(request: PluginRequest) -> Any: ...


@asynccontextmanager
async def lifespan(services: PluginContext) -> AsyncIterator[None]:
    yield


async def generator(services: PluginContext) -> AsyncIterator[None]:
    yield


def takes_certificate(certificate: Certificate) -> str | None: ...


async def takes_two(request: PluginRequest, extra: str) -> Any: ...


def takes_two_too(given: object, extra: str) -> Any: ...


class Object:
    async def __call__(self, request: PluginRequest) -> Any: ...


@pytest.mark.parametrize(
    "members",
    [
        {
            "authorize": takes_request,
            "before_pull": takes_request,
            "intercept_pull": takes_request,
            "intercept_push": takes_request,
        },
        {"lifespan": lifespan},
        {
            "cap_validators": {
                "device": takes_certificate,
                "member": partial(takes_certificate),
                "audience": takes_certificate,
            }
        },
        {"authorize": partial(takes_request)},
        {"authorize": Object()},
        {"_afterWrite": 1, "authorized_by": 1, "events": [], "written": 2, "lifetime_s": 3},
    ],
)
def test_object_with_a_name_and_a_hook_is_a_plugin(members: dict[str, object]) -> None:
    plugin = named(**members)
    assert load(given=(plugin,)) == (plugin,)


@pytest.mark.parametrize(
    ("slip", "hook"),
    [
        ("afterWrite", "after_write"),
        ("after_writes", "after_write"),
        ("authorise", "authorize"),
        ("authorizes", "authorize"),
        ("beforePull", "before_pull"),
        ("before_push", "before_pull"),
        ("intercept_pul", "intercept_pull"),
        ("interceptPush", "intercept_push"),
        ("life_span", "lifespan"),
        ("capValidators", "cap_validators"),
    ],
)
def test_a_hook_with_a_slip_in_its_name_is_rejected(slip: str, hook: str) -> None:
    message = f"{slip} is no hook; did you mean {hook}? (begin it with _ if it is none)"
    assert faults_of(named(**{slip: takes_request})) == [message]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"name": None}, 'Sample has no name: give it one, name = "..."'),
        ({"name": ""}, 'Sample has no name: give it one, name = "..."'),
        ({"name": "a\nb"}, 'Sample has no name: give it one, name = "..."'),
        ({"after_write": None}, "after_write is not callable"),
        ({"authorize": ["editor"]}, "authorize is not callable"),
        ({"authorize": waits_not}, "authorize must be async: async def authorize(self, request)"),
        ({"before_pull": generator}, "before_pull must be async: async def before_pull(self, request)"),
        ({"intercept_push": takes_two},
         "intercept_push takes the wrong arguments: async def intercept_push(self, push)"),
        ({"lifespan": takes_request},
         "lifespan must return an asynchronous context manager: put @asynccontextmanager above it"),
        ({"lifespan": generator},
         "lifespan must return an asynchronous context manager: put @asynccontextmanager above it"),
        ({"lifespan": takes_two_too},
         "lifespan takes the wrong arguments: def lifespan(self, services)"),
        ({"cap_validators": [takes_certificate]},
         "cap_validators must be a mapping of kinds of certificates to functions"),
        ({"cap_validators": {"members": takes_certificate}},
         "cap_validators: there is no kind 'members' of certificates, only device, member, audience"),
        ({"cap_validators": {"member": "no"}}, "cap_validators: that of member is not callable"),
        ({"cap_validators": {"member": takes_request}}, "cap_validators: that of member must not be async"),
        ({"cap_validators": {"member": takes_two_too}},
         "cap_validators: that of member takes one argument, the certificate"),
    ],
)  # fmt: skip
def test_object_that_is_no_plugin_is_rejected(members: dict[str, object], message: str) -> None:
    assert faults_of(named(**members)) == [message]


def test_an_object_without_hooks_is_rejected() -> None:
    (message,) = faults_of(type("Idle", (), {"name": "idle"})())
    assert message.startswith("Idle has no hook: one or more of authorize, before_pull, ")


def test_hooks_that_are_merely_inherited_from_the_protocol_are_none() -> None:
    class Audit(Plugin):
        name = "audit"

        async def after_write(self, event: WriteEvent) -> None: ...

    class Idle(Plugin):
        name = "idle"

    assert len(load(given=(Audit(),))) == 1  # type: ignore[abstract]
    assert faults_of(Idle())[0].startswith("Idle has no hook")  # type: ignore[abstract]


def test_all_faults_of_all_plugins_are_reported_at_once(folder: Path) -> None:
    (folder / "others.py").write_text(AUDIT.replace("after_write(self, event)", "afterWrite(self)"))
    assert faults("audits:plugin", "nowhere:plugin", "others:plugin", given=(named("given"),)) == [
        "plugins[1]: there is no module nowhere",
        "plugins[2]: afterWrite is no hook; did you mean after_write? (begin it with _ if it is none)",
        "plugins[2]: Audit has no hook: one or more of authorize, before_pull, intercept_pull, "
        "intercept_push, before_delete, after_write, after_delete, lifespan, cap_validators, stored_files",
        "plugins[2]: 'audit' is also the name of plugins[0]",
    ]


SEEN = """
import os

from pysync.plugins import PullResponse

class Seen:
    name = "seen"

    def __init__(self):
        self.made_by = os.getpid()

    async def intercept_pull(self, request):
        return PullResponse(b"%d %d" % (self.made_by, os.getpid()))
"""


@pytest.mark.process
async def test_each_worker_loads_its_own_plugins_from_next_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "seen_by.py").write_text(SEEN)
    seen: set[bytes] = set()
    async with serving(tmp_path, plugins=["seen_by:Seen"], server={"workers": 2}) as served:
        while len(seen) < 2:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{served.base}/pull/notes/a") as answer,
            ):
                made_by, requested = (await answer.read()).split()
            assert made_by == requested
            seen.add(made_by)
    assert str(served.process.pid).encode() not in seen


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_whose_plugins_are_none_does_not_start(workers: int, tmp_path: Path) -> None:
    (tmp_path / "audits.py").write_text(AUDIT.replace("after_write", "afterWrite"))
    settings = {
        "store": "file:./data",
        "server": {"workers": workers, "port": 0},
        "plugins": ["audits:plugin"],
    }
    (tmp_path / "c.json").write_text(json.dumps(settings))
    for command in (["serve", "--config", "c.json"], ["check", "c.json"]):
        ran = subprocess.run(
            [sys.executable, "-m", "pysync", *command],
            capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False,
        )  # fmt: skip
        assert ran.returncode == 1
        assert "afterWrite is no hook; did you mean after_write?" in ran.stdout + ran.stderr
        assert "Traceback" not in ran.stderr


@pytest.mark.process
def test_check_accepts_a_configuration_whose_plugins_load(tmp_path: Path) -> None:
    (tmp_path / "audits.py").write_text(AUDIT)
    (tmp_path / "c.json").write_text(json.dumps({"plugins": ["audits:plugin"]}))
    ran = subprocess.run(
        [sys.executable, "-m", "pysync", "check", "c.json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False,
    )  # fmt: skip
    assert ran.returncode == 0
    assert ran.stdout.startswith("c.json: accepted")
