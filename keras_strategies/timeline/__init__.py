"""Events of a process, in a file in shared memory that survives it.

Standard library only: no Keras, no framework. `recording.py` writes the ring of this
process, `ring.py` has its format, `runs.py` reads those of a run's processes, and
`watch.py` says who waits for whom.
"""
