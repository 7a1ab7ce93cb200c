"""Groups of processes: environment, start, output, supervision and end.

No module imports Keras; the started processes do.
"""
