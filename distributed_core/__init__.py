"""A task scheduler daemon for unmodified Dask clients and workers.

``LocalCluster`` is the way in from Python. The scheduler's process imports this package too, so
nothing is imported here before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed_core.deploy.local_cluster import LocalCluster

    __version__: str

__all__ = ["LocalCluster", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LocalCluster":
        from distributed_core.deploy.local_cluster import LocalCluster

        return LocalCluster
    if name == "__version__":
        from importlib.metadata import version

        return version("distributed-core")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
