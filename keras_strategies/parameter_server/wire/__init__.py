"""Messages between the processes: requests, shared memory, heartbeats."""
