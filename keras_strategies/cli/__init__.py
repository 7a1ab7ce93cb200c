"""The command `keras-strategies`, and `ks.launch`: clusters on this machine.

Nothing here imports Keras; the processes that are started do.
"""
