"""A parameter server's process: variables, optimizer updates, snapshots."""
