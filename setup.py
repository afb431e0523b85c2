"""Extension list and build switches; everything else is in ``pyproject.toml``.

Switches (environment):

``DC_DEBUG=1``     ``-O0 -g3``, for a debugger.
``DC_TRACE=1``     Line tracing, which coverage of ``.pyx`` files needs.
``DC_ANNOTATE=1``  Yellow HTML beside each generated C file.
``DC_SANITIZE=1``  Address and undefined-behavior sanitizers.
``DC_ONLY=a,b``    Build these modules alone (developers).
``DC_JOBS=n``      Translate so many modules at a time; by default one a processor on Linux.
"""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, setup

DEBUG = os.environ.get("DC_DEBUG") == "1"
TRACE = os.environ.get("DC_TRACE") == "1"
SANITIZE = os.environ.get("DC_SANITIZE") == "1"
# Elsewhere child processes are spawned, which would run this file again.
JOBS = int(os.environ.get("DC_JOBS") or (os.cpu_count() or 1 if sys.platform == "linux" else 0))
ONLY = set(filter(None, os.environ.get("DC_ONLY", "").split(",")))

DIRECTIVES = {
    "language_level": 3,
    "binding": True,
    "embedsignature": False,
    # On in every build: reading a C attribute of None must raise, not return garbage.
    "boundscheck": True,
    "nonecheck": True,
    "wraparound": False,
    "initializedcheck": False,
    "cdivision": True,
    "linetrace": TRACE,
    "warn.undeclared": False,
    "warn.unreachable": True,
    "warn.maybe_uninitialized": True,
}

Options.warning_errors = True

compile_args = ["-O0", "-g3"] if DEBUG else ["-O3"]
link_args: list[str] = []
if SANITIZE:
    compile_args += ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    link_args += ["-fsanitize=address,undefined"]
macros = [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1")] if TRACE else []


def extensions() -> list[Extension]:
    """One extension ``cython_ext.NAME`` for each ``.pyx``."""
    names = sorted(path.stem for path in Path("cython_ext").glob("*.pyx"))
    if ONLY:
        names = [name for name in names if name in ONLY]
    return [
        Extension(
            f"cython_ext.{name}",
            [f"cython_ext/{name}.pyx"],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            define_macros=macros,
        )
        for name in names
    ]


setup(
    ext_modules=cythonize(
        extensions(),
        compiler_directives=DIRECTIVES,
        annotate=os.environ.get("DC_ANNOTATE") == "1",
        nthreads=JOBS,
    )
)
