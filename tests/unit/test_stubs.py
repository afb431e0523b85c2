"""Each compiled module has a stub, and the stub says what the module has: no more, no less."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CYTHON = Path(__file__).parents[2] / "cython_ext"
MODULES = sorted(path.stem for path in CYTHON.glob("*.pyx"))


def stub_of(module: str) -> ast.Module:
    return ast.parse((CYTHON / f"{module}.pyi").read_text())


def exported(stub: ast.Module) -> set[str]:
    """The names in the ``__all__`` of a stub."""
    for node in stub.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            value: ast.expr = node.value  # type: ignore[attr-defined]
            return set(ast.literal_eval(value))
    raise AssertionError("the stub has no __all__")


def public_names(module: ModuleType) -> set[str]:
    """What a module offers: its ``__all__``, or all that it defines without an underscore."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) == module.__name__
    }


def members(node: ast.ClassDef) -> set[str]:
    found = set()
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(child.name)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.add(child.target.id)
    return {name for name in found if not name.startswith("_")}


def actual_members(cls: type[Any]) -> set[str]:
    # What a base has, too, is in the stub of the base.
    inherited = {name for base in cls.__bases__ for name in vars(base)}
    return {name for name in vars(cls) if not name.startswith("_") and name not in inherited}


@pytest.mark.parametrize("module", MODULES)
def test_stub_names_what_the_module_has(module: str) -> None:
    loaded = importlib.import_module(f"cython_ext.{module}")
    assert exported(stub_of(module)) == public_names(loaded)


@pytest.mark.parametrize("module", MODULES)
def test_stub_classes_have_the_members_of_the_module(module: str) -> None:
    loaded = importlib.import_module(f"cython_ext.{module}")
    for node in stub_of(module).body:
        if isinstance(node, ast.ClassDef) and node.name in exported(stub_of(module)):
            cls = getattr(loaded, node.name)
            if issubclass(cls, BaseException):
                continue
            assert members(node) == actual_members(cls), node.name
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)} - {"Protocol"}
            assert {base.__name__ for base in cls.__bases__} - {"object"} == bases, node.name


@pytest.mark.parametrize("module", MODULES)
def test_stub_functions_take_what_the_module_takes(module: str) -> None:
    loaded = importlib.import_module(f"cython_ext.{module}")
    for node in stub_of(module).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        code = getattr(getattr(loaded, node.name), "__code__", None)
        if code is None:
            continue
        arguments = node.args
        names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
        names += [arg.arg for arg in arguments.kwonlyargs]
        count = code.co_argcount + code.co_kwonlyargcount
        assert list(code.co_varnames[:count]) == names, node.name


def test_no_stub_is_left_of_a_module_that_is_gone() -> None:
    assert {path.stem for path in CYTHON.glob("*.pyi")} == set(MODULES)
