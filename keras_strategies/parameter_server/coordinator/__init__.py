"""The coordinator's process: scheduling, supervision, `fit` and status."""
