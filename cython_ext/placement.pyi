"""Types of ``cython_ext.placement``: nothing that Python sees."""

__all__: list[str] = []
