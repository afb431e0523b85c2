"""Clusters on one machine: the daemon and its workers as child processes.

The only part of the package that may import ``dask`` and ``distributed``; nothing that the
scheduler's process imports may import this.
"""
