"""Ray as an engine: tasks of a cluster in actors, placed over the nodes.

No module imports ray before a resolver connects to a cluster.
"""
