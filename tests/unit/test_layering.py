"""Imports point downwards only, and the scheduler's process never meets what opens user bytes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CYTHON = ROOT / "cython_ext"
PYTHON = ROOT / "distributed_core"

WIRE_MODULES = {"frames", "inbound", "msgpack", "outbound"}
ENGINE_MODULES = {path.stem for path in CYTHON.glob("*.pyx")} - WIRE_MODULES

# Each engine module, and the ones it may build on. What is not listed builds on all before it.
ENGINE_ORDER = [
    "states",
    "entities",
    "events",
    "journal",
    "graph",
    "sink",
    "heaps",
    "cluster",
    "placement",
    "transitions",
    "invariants",
]

# Packages of distributed_core, lowest first; a package imports those before it, and itself.
LOWER = {
    "protocol": {"protocol", "config"},
    "comm": {"comm", "config", "protocol"},
    "engine": {"engine"},
    "config": {"config"},
}

# Modules that run outside of the scheduler's process, and may import Dask.
OTHER_PROCESSES = {
    "demo.py",
    *(f"materializer/{path.name}" for path in (PYTHON / "materializer").glob("child*.py")),
}

FORBIDDEN = ("dask", "distributed", "cloudpickle", "tornado")


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names that a Python file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def cython_imports_of(module: str) -> set[str]:
    """Names of our modules that a Cython module imports or cimports, in .pyx or .pxd."""
    text = (CYTHON / f"{module}.pyx").read_text()
    declarations = CYTHON / f"{module}.pxd"
    if declarations.exists():
        text += declarations.read_text()
    return set(
        re.findall(r"^\s*(?:from|c?import)\s+((?:cython_ext|distributed_core)[\w.]*)", text, re.M)
    )


def python_files(package: str) -> list[Path]:
    return sorted((PYTHON / package).rglob("*.py"))


@pytest.mark.parametrize("module", sorted(ENGINE_MODULES))
def test_engine_modules_know_neither_wire_nor_shell(module: str) -> None:
    for name in cython_imports_of(module):
        package, _, imported = name.partition(".")
        assert package == "cython_ext", f"{module} imports {name}"
        assert imported not in WIRE_MODULES, f"{module} imports {name}"


@pytest.mark.parametrize("module", ENGINE_ORDER)
def test_engine_modules_build_on_lower_ones_only(module: str) -> None:
    lower = ENGINE_ORDER[: ENGINE_ORDER.index(module)]
    above = {name.partition(".")[2] for name in cython_imports_of(module)} - {*lower, module}
    # The machine imports the checks when it is told to check, not before.
    assert above <= ({"invariants"} if module == "transitions" else set())


def test_every_engine_module_has_its_place() -> None:
    assert set(ENGINE_ORDER) == ENGINE_MODULES


def test_engine_modules_have_no_clock_no_chance_and_no_world() -> None:
    for module in ENGINE_MODULES:
        text = (CYTHON / f"{module}.pyx").read_text()
        found = re.findall(
            r"^\s*(?:from|import)\s+(time|random|os|socket|asyncio|logging|threading|pickle)\b",
            text,
            re.M,
        )
        assert not found, f"{module} imports {found}"


@pytest.mark.parametrize("package", sorted(LOWER))
def test_lower_packages_do_not_import_higher_ones(package: str) -> None:
    for path in python_files(package):
        for name in imports_of(path):
            if name.startswith("distributed_core."):
                assert name.split(".")[1] in LOWER[package], f"{path.name} imports {name}"


def test_the_engines_face_knows_no_wire() -> None:
    for path in python_files("engine"):
        for name in imports_of(path):
            if name.startswith("cython_ext."):
                assert name.split(".")[1] not in WIRE_MODULES, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(PYTHON.rglob("*.py"))
        if path.relative_to(PYTHON).parts[0] != "deploy"
        and path.relative_to(PYTHON).as_posix() not in OTHER_PROCESSES
    ],
    ids=lambda path: path.relative_to(PYTHON).as_posix(),
)
def test_modules_of_the_scheduler_import_nothing_that_opens_user_bytes(path: Path) -> None:
    for name in imports_of(path):
        assert name.split(".")[0] not in FORBIDDEN, f"{path} imports {name}"
        assert name not in ("pickle.loads", "pickle.load", "pickle.Unpickler"), f"{path}: {name}"
    text = path.read_text()
    assert not re.search(r"\bpickle\.(load|loads|Unpickler)\b", text), path


def test_the_engine_alone_loads_nothing_but_itself() -> None:
    """In a process of its own: the engine and its face, and no other module of ours."""
    script = (
        "import sys\n"
        "import distributed_core.engine.scheduler, cython_ext.invariants\n"
        "print('\\n'.join(sorted(sys.modules)))\n"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert not {name for name in loaded if name.split(".")[0] in FORBIDDEN}
    ours = {name for name in loaded if name.startswith(("cython_ext.", "distributed_core."))}
    expected = {f"cython_ext.{name}" for name in ENGINE_MODULES}
    assert ours - {name for name in ours if name.startswith("distributed_core.engine")} == expected
