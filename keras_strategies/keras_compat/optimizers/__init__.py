"""Optimizers: their updates as pure functions, and which variables these use."""
