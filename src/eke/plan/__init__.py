"""Plans with every derived decision, identities of runs, and records.

Input: a `Config`, a device and prepared data. Output: a frozen `Plan`, its run id, and later a
`Record`. Begin with `planner.make_plan`, `identity` and `record`.
"""
