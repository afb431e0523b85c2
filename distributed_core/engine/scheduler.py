def dump(*a): return {}
