"""A task scheduler daemon for unmodified Dask clients and workers."""
