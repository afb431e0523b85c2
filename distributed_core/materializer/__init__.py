"""Opens submitted graphs in processes of their own and hands back plain data.

Owns everything about user bytes of `update-graph`. The scheduler process imports `pool` and
`parts`; the modules named `child*` run in the materializer process and are imported nowhere else.
"""
