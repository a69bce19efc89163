"""What deploy/ holds fits together and fits this version, as far as that can be told without containers."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cli_runner import Shell
from support.clients import Start
from support.deployment import DEPLOY, ROOT

from pysync import config
from pysync.cli.main import build_parser
from pysync.clock import BOOT_ID_PATH
from pysync.config import Server
from pysync.server.process.worker import ROUNDS, STALL_S

UNIT = DEPLOY / "pysync.service"
BACKUP = DEPLOY / "pysync-backup.service"
TIMER = DEPLOY / "pysync-backup.timer"
COMPOSE = [DEPLOY / "compose.yaml", DEPLOY / "compose.cluster.yaml"]
EXECUTABLE = "/opt/pysync/bin/pysync"
"""Where the unit and the image have it."""
DRAIN_S = Server().drain_timeout_ms / 1000


def environment_of_the_example() -> dict[str, str]:
    """The variables of .env.example, those that it leaves open filled in."""
    lines = (DEPLOY / ".env.example").read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value or "0123456789abcdef" for name, _, value in pairs}


def node_environment() -> dict[str, str]:
    """What a node of the cluster finds in its environment."""
    given = environment_of_the_example()
    node = yaml.safe_load(COMPOSE[1].read_text())["services"]["node1"]
    return {name: filled(value, given) for name, value in node["environment"].items()}


def filled(value: str, given: dict[str, str]) -> str:
    """A value of a compose file, its variables replaced. Raises KeyError for one that must be given and is
    not."""

    def replace(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        return given[name] if kind != ":-" else given.get(name, default)

    return re.sub(r"\$\{(\w+)(:-|:\?)?([^}]*)\}", replace, value)


def test_the_readme_names_every_file() -> None:
    text = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name not in ("README.md", ".env"):
            assert f"`{path.relative_to(DEPLOY)}`" in text


# --- configurations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({path.name for path in DEPLOY.glob("*.json")} - {"grafana.json"}))
def test_pysync_check_accepts_every_configuration(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable, value in node_environment().items():
        monkeypatch.setenv(variable, value)
    status, printed, _ = shell.run("check", str(DEPLOY / name))
    assert status == 0, printed


def test_a_cluster_shares_its_store_and_its_coordinator() -> None:
    settings = config.load(DEPLOY / "cluster.json", node_environment())
    assert settings.is_multi_process
    assert settings.store.url.startswith("s3://")
    assert settings.store.endpoint == "http://s3:8333"
    assert settings.coordinator == "redis://:0123456789abcdef@redis:6379/0"


def test_both_configurations_serve_the_same_collections() -> None:
    """So who outgrows one machine changes the store and the coordinator, and nothing else."""
    one, cluster = (json.loads((DEPLOY / name).read_text()) for name in ("one.json", "cluster.json"))
    assert one["collections"] == cluster["collections"]
    assert one["rateLimit"] == cluster["rateLimit"]
    settings = config.load(DEPLOY / "one.json", {})
    for collection in settings.collections:
        for action in ("pull", "push"):
            assert settings.effective_limit(collection, action) is not None, collection.name


def test_notes_of_the_example_page_have_a_history_that_tells_deleted_from_lost() -> None:
    settings = config.load(DEPLOY / "example.json", {})
    (notes,) = (one for one in settings.collections if one.name == "notes")
    assert notes.deletable
    assert notes.history is not None
    assert notes.history.for_ms is None, "else what was deleted long ago passes for lost"


# --- systemd ---------------------------------------------------------------------------------------------


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The folder of the units, with the pysync of these tests."""
    for unit in (UNIT, BACKUP, TIMER):
        text = unit.read_text().replace(EXECUTABLE, str(Path(sys.executable).parent / "pysync"))
        (tmp_path / unit.name).write_text(text)
    return tmp_path


@pytest.mark.process
@pytest.mark.parametrize("name", [UNIT.name, BACKUP.name, TIMER.name])
def test_systemd_understands_the_unit(systemd_analyze: str, units: Path, name: str) -> None:
    command = [systemd_analyze, "verify", str(units / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
@pytest.mark.parametrize(("name", "most"), [(UNIT.name, 15), (BACKUP.name, 25)])
def test_the_unit_leaves_little_to_attack(systemd_analyze: str, units: Path, name: str, most: int) -> None:
    """1.2 of 10 at systemd 252: what is left is the network, without which it would be no server. The backup
    is root as well, to read the files of another user."""
    command = [systemd_analyze, "security", "--offline=true", f"--threshold={most}", "--no-pager"]
    done = subprocess.run([*command, str(units / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def settings_of_the_unit(unit: Path = UNIT) -> dict[str, str]:
    lines = [line.partition("=") for line in unit.read_text().splitlines() if not line.startswith("#")]
    return {name: value for name, _, value in lines}


def test_a_process_that_hangs_has_logged_its_stacks_before_systemd_ends_it() -> None:
    settings = settings_of_the_unit()
    assert settings["Type"] == "notify"
    assert float(settings["WatchdogSec"].removesuffix("s")) > STALL_S + STALL_S / ROUNDS
    assert settings["Restart"] == "on-failure", "which a watchdog is"


def test_systemd_waits_for_a_database_that_is_brought_up_to_date() -> None:
    assert settings_of_the_unit()["TimeoutStartSec"] == "infinity"


def test_the_backup_may_write_where_its_commands_do() -> None:
    writable = settings_of_the_unit(BACKUP)["ReadWritePaths"].split()
    lines = re.findall(r"^ExecStart=(.*)$", BACKUP.read_text(), re.M)
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == EXECUTABLE
        build_parser().parse_args(arguments)
        for place in re.findall(r"file:(\S+)", line):
            resolved = place.replace("/var/lib/pysync/", "/var/lib/private/pysync/")
            assert any(resolved.startswith(f"{folder}/") for folder in writable), place
    assert len(lines) == 2


def test_the_unit_shows_the_server_which_start_of_the_machine_it_is() -> None:
    """`ProcSubset=pid` hides the file that says so, whose name begins with that of /proc/sys."""
    assert str(BOOT_ID_PATH).startswith("/proc/sys/")
    assert settings_of_the_unit().get("ProcSubset", "all") == "all"


def test_the_unit_waits_until_the_clock_is_set() -> None:
    assert "time-sync.target" in settings_of_the_unit()["After"].split()


def test_the_unit_starts_what_pysync_understands() -> None:
    program, *arguments = shlex.split(settings_of_the_unit()["ExecStart"])
    assert program == EXECUTABLE
    assert understood(arguments).config == "/etc/pysync/config.json"


def test_systemd_waits_for_draining_and_signals_only_the_main_process() -> None:
    settings = settings_of_the_unit()
    assert float(settings["TimeoutStopSec"].removesuffix("s")) > DRAIN_S
    assert (settings["KillMode"], settings["KillSignal"]) == ("mixed", "SIGTERM")


def understood(arguments: list[str]) -> Any:
    """The options that the command line makes of `arguments`; it exits where it does not know one."""
    options = build_parser().parse_args(arguments)
    assert options.parser.prog == "pysync serve"
    return options


# --- image -----------------------------------------------------------------------------------------------


def instructions() -> Iterator[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments, continued lines joined."""
    text = "\n".join(
        line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")
    )
    for line in text.replace("\\\n", " ").splitlines():
        if line:
            name, _, rest = line.partition(" ")
            yield name, rest


def last(name: str) -> str:
    """The arguments of the last such instruction."""
    return [rest for found, rest in instructions() if found == name][-1]


def test_the_image_starts_what_pysync_understands_as_its_first_process() -> None:
    entry, arguments = json.loads(last("ENTRYPOINT")), json.loads(last("CMD"))
    assert entry == [EXECUTABLE], "a list, without a shell: it gets the signals"
    assert understood(arguments).config == "/etc/pysync/config.json"


def test_the_image_runs_as_a_user_whose_number_stays() -> None:
    user = last("USER")
    assert user == "10001:10001"
    assert "--uid 10001" in last("RUN")


def test_the_image_serves_where_its_volume_and_its_port_are() -> None:
    variables = dict(pair.split("=") for pair in last("ENV").split())
    settings = config.load(DEPLOY / "one.json", variables)
    assert settings.server.admin is not None
    found = [(one.host, one.port) for one in (settings.server, settings.server.admin)]
    assert found == [("0.0.0.0", int(port)) for port in last("EXPOSE").split()]
    assert settings.store.url.removeprefix("file:.") == last("VOLUME"), "relative to the working directory"
    assert last("WORKDIR") == "/"


def test_the_extension_of_the_image_is_built_for_any_machine() -> None:
    assert not any("RUSTFLAGS" in rest for name, rest in instructions() if name != "COPY")
    assert ("COPY", ".cargo .cargo") in list(instructions()), "what chooses its instructions at run time"


def test_the_image_is_made_of_files_that_exist_and_that_the_builder_is_sent() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored, "nothing is sent that is not named"
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    sources = {source for each in copied for source in each}
    assert sources == set(sent)
    for source in sources:
        assert (ROOT / source).exists(), source
    assert any(fnmatch("pysync/_core.abi3.so", pattern) for pattern in ignored), (
        "an extension of this machine"
    )


@pytest.mark.process
async def test_the_health_check_of_the_image_accepts_a_server_that_answers(start: Start) -> None:
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    port = (await start({"server": {"publicHosts": ["sync.example"]}})).rpartition(":")[2]
    assert await health(command[2].replace("8081", port)) == 0
    assert await health(command[2].replace("8081", "1")) != 0


async def health(code: str) -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait()


# --- compose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_names_what_exists(path: Path) -> None:
    composed = yaml.safe_load(path.read_text())
    for name, service in composed["services"].items():
        assert "build" in service or "image" in service, name
        if "build" in service:
            context = (DEPLOY / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).exists()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in composed["volumes"]
        for network in service.get("networks", ()):
            assert network in composed["networks"]
        for needed, how in dict(service.get("depends_on", {})).items():
            other = composed["services"][needed]
            if how["condition"] == "service_healthy":
                assert "healthcheck" in other or "build" in other, "our image brings its own"


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_compose_file_takes_its_secrets_from_the_environment(path: Path) -> None:
    text = path.read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    assert required <= environment_of_the_example().keys()
    for value in re.findall(r"^ *\w*(?:SECRET|PASSWORD|TOKEN|AUTH)\w*: *(.*)", text, re.M):
        assert value.startswith('"${'), value


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_containers_of_pysync_are_given_the_time_to_drain_and_little_else(path: Path) -> None:
    services = yaml.safe_load(path.read_text())["services"].values()
    nodes = [service for service in services if service["image"] == "pysync"]
    assert nodes
    for node in nodes:
        assert float(node["stop_grace_period"].removesuffix("s")) > DRAIN_S
        assert node["read_only"]
        assert node["cap_drop"] == ["ALL"]
        assert "command" not in node, "the image's own is checked above"


def test_redis_keeps_what_it_acknowledged_and_forgets_nothing_for_room() -> None:
    command = " ".join(yaml.safe_load(COMPOSE[1].read_text())["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


def test_nginx_knows_the_nodes_of_the_compose_file() -> None:
    services = yaml.safe_load(COMPOSE[1].read_text())["services"]
    named = re.findall(r"server (\w+):8080", (DEPLOY / "nginx/cluster.conf").read_text())
    assert named == [name for name, service in services.items() if service["image"] == "pysync"]
    assert named == list(services["nginx"]["depends_on"])


def test_caddy_knows_its_name_and_the_node_of_the_compose_file() -> None:
    services = yaml.safe_load(COMPOSE[0].read_text())["services"]
    given = services["caddy"]["environment"]
    assert set(re.findall(r"\{\$(\w+)", (DEPLOY / "caddy/Caddyfile").read_text())) == set(given)
    host, _, port = given["NODES"].partition(":")
    assert services[host]["image"] == "pysync"
    assert int(port) == config.load(DEPLOY / "one.json", {}).server.port
    assert services[host]["environment"]["PYSYNC_SERVER_TRUSTED_PROXY_HOPS"] == "1"
    assert not any(published.endswith(f":{port}") for published in services[host]["ports"])
