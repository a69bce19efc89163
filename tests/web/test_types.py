"""`pysync.d.ts` says what `pysync.js` exports, and programs in TypeScript can use it."""

import re
import subprocess
from pathlib import Path

import pytest
from support.browser import Chromium
from support.clients import Start
from support.configurations import ROOT
from support.web_pages import blank_page, web_service

TYPES = (ROOT / "pysync/web/pysync.d.ts").read_text()
PROGRAM = Path(__file__).with_name("uses_every_export.ts")
COMPILER_OPTIONS = (
    "--strict",
    "--noEmit",
    "--noUnusedLocals",
    "--noUncheckedIndexedAccess",
    "--target", "es2022",
    "--module", "nodenext",
    "--lib", "es2022,dom,dom.asynciterable",
)  # fmt: skip


def exported(kinds: str) -> set[str]:
    """The names that the types export as one of `kinds`, which are joined by `|`."""
    return set(re.findall(rf"^export (?:{kinds}) (\w+)", TYPES, re.M))


def compiled(typescript: Path, program: Path) -> str:
    """What the compiler says about a program."""
    command = ["node", str(typescript), *COMPILER_OPTIONS, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert (done.returncode == 0) == (done.stdout == "")
    return done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_program_that_uses_every_export_compiles(typescript: Path) -> None:
    assert compiled(typescript, PROGRAM) == ""


def test_program_imports_every_export() -> None:
    """The compiler rejects an import that is not used."""
    imported = re.search(r"^import \{(.*?)\} from", PROGRAM.read_text(), re.M | re.S)
    assert imported is not None
    names = set(re.findall(r"\w+", imported[1].replace("type ", "")))
    assert names == exported("class|const|function|interface|type")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('new pysync.Client("/", { key: 1 });', "'key' does not exist in type 'ClientOptions'"),
        ("pysync.Conflict;", "Property 'Conflict' does not exist"),
        ('pysync.userId("") === "";', "have no overlap"),
        ('new pysync.Client("/").certificate = null;', "Type 'null' is not assignable"),
    ],
)
def test_wrong_use_does_not_compile(typescript: Path, tmp_path: Path, line: str, error: str) -> None:
    program = tmp_path / "wrong.ts"
    program.write_text(f'import * as pysync from "{ROOT}/pysync/web/pysync.js";\n{line}\n')
    assert error in compiled(typescript, program)


async def test_module_exports_what_its_types_declare(start: Start, screen: Chromium) -> None:
    window = await blank_page(screen, await web_service(start))
    assert set(await window.run("Object.keys(pysync)")) == exported("class|const|function")


METHODS = """Object.fromEntries(Object.entries(pysync).flatMap(([name, kind]) => {
  if (!kind.prototype) return []
  const methods = []
  for (let parent = kind; parent.prototype && parent !== Error; parent = Object.getPrototypeOf(parent)) {
    for (const each of [parent, parent.prototype]) {
      const members = Object.entries(Object.getOwnPropertyDescriptors(each))
      methods.push(...members.filter(([, {value}]) => value instanceof Function).map(([member]) => member))
    }
  }
  return [[name, methods]]
}))"""
INTERNAL = {"constructor", "deriveShared"}


async def test_classes_have_the_methods_that_their_types_declare(start: Start, screen: Chromium) -> None:
    window = await blank_page(screen, await web_service(start))
    found = await window.run(METHODS)
    classes = re.findall(r"^export class (\w+)[^\n]*\{\n(.*?)^\}", TYPES, re.M | re.S)
    assert {"Client", "Replica"} <= {name for name, _ in classes}
    for name, body in classes:
        declared = set(re.findall(r"^  (?:static )?(\w+)\(", body, re.M)) - INTERNAL
        assert {each for each in found[name] if not each.startswith("_")} - INTERNAL == declared, name
