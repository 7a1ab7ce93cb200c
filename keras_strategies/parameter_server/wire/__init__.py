"""Messages between the processes: transport, pickling, shared memory, heartbeats."""
