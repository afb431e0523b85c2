"""The compiled modules are those of the sources that lie beside them, and keep our rules."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

CYTHON = Path(__file__).parents[2] / "cython_ext"
MODULES = sorted(path.stem for path in CYTHON.glob("*.pyx"))

# Return types of which NULL says that an exception is set.
OBJECTS = r"(?:object|str|bytes|bytearray|dict|list|tuple|set|frozenset|memoryview|[A-Z]\w*)"


def sources_of(module: str) -> set[Path]:
    """The files that a module is compiled from: its own, and declarations it cimports."""
    found: set[Path] = set()
    stack = [CYTHON / f"{module}.pyx", CYTHON / f"{module}.pxd"]
    while stack:
        path = stack.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for name in re.findall(r"^from cython_ext\.(\w+) cimport", path.read_text(), re.M):
            stack.append(CYTHON / f"{name}.pxd")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_extension_is_newer_than_its_sources(module: str) -> None:
    loaded = importlib.import_module(f"cython_ext.{module}")
    built = Path(loaded.__file__ or "")
    if built.parent != CYTHON:
        pytest.skip(f"{built} is an installed build")
    age = built.stat().st_mtime
    newer = [path.name for path in sources_of(module) if path.stat().st_mtime > age]
    assert not newer, f"{built.name} is older than {newer}: run setup.py build_ext --inplace"


def functions_of(path: Path) -> list[tuple[str, str]]:
    """Name and full declaration of each ``cdef``/``cpdef`` function in a file."""
    text = re.sub(r"#.*", "", path.read_text())
    found = []
    for match in re.finditer(
        r"^[ ]*(?:cdef|cpdef)[ ]+(?!class\b|enum\b|struct\b|extern\b)[^\n=()]*?(\w+)[ ]*\(",
        text,
        re.M,
    ):
        depth = 1
        at = match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        end = text.index("\n", at)
        found.append((match.group(1), re.sub(r"\s+", " ", text[match.start() : end]).strip()))
    return found


@pytest.mark.parametrize(
    "path",
    sorted([*CYTHON.glob("*.pyx"), *CYTHON.glob("*.pxd")]),
    ids=lambda path: path.name,
)
def test_no_compiled_function_can_lose_an_exception(path: Path) -> None:
    """A function that returns no object says which value means an exception, or that none can."""
    silent = []
    for name, declaration in functions_of(path):
        if name in ("sizeof",) or declaration.startswith("cdef packed"):
            continue
        if re.match(rf"^cp?def (?:inline )?(?:{OBJECTS} )?\w+ ?\(", declaration):
            continue
        if not re.search(r"\) ?(?:except\b|noexcept\b)", declaration):
            silent.append(declaration)
    assert not silent


def test_the_check_sees_what_it_must(tmp_path: Path) -> None:
    path = tmp_path / "sample.pyx"
    path.write_text(
        "cdef int lost(self, Task task):\n    return 0\n"
        "cdef Task fine(int a):\n    return None\n"
        "cdef int kept(\n    self,\n    object x=None,\n) except -1:\n    return 0\n"
        "cdef inline bint quiet(int a) noexcept nogil:\n    return True\n"
    )
    assert functions_of(path) == [
        ("lost", "cdef int lost(self, Task task):"),
        ("fine", "cdef Task fine(int a):"),
        ("kept", "cdef int kept( self, object x=None, ) except -1:"),
        ("quiet", "cdef inline bint quiet(int a) noexcept nogil:"),
    ]


def test_sources_have_no_leftovers() -> None:
    for path in sorted([*CYTHON.glob("*.pyx"), *CYTHON.glob("*.pxd")]):
        text = path.read_text()
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), path.name
        assert not re.search(r"^\s*print\(", text, re.M), path.name
        assert max(map(len, text.splitlines()), default=0) <= 100, path.name
        if path.suffix == ".pyx":
            assert text.startswith('"""'), path.name
