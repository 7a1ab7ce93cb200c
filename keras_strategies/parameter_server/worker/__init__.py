"""A worker's process: the steps of tasks against the servers."""
