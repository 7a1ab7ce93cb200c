"""Groups of processes: environment, start, output, watch and end.

No module imports Keras; the started processes do.
"""
