"""The control plane of connected workers: a process that leads, and trains nothing.

`decisions.py` decides, as a pure function of events, which workers form a generation,
which of them is the chief, from which step it begins, and when it ends. `server.py` is
the process, with one thread and one connection for each worker; `client.py` is a worker
as seen by itself, with one thread. No tensor of a step is sent this way.
"""
