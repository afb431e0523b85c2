def story_tuples(*a): return {}
