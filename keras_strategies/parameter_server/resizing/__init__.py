"""Change of the number of parameter servers: assignment and transfer of shards."""
