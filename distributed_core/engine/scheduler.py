def dump(*a): return {}
def explain(*a): return []
