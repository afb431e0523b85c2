"""Types of ``cython_ext.graph``: nothing that Python sees."""

__all__: list[str] = []
