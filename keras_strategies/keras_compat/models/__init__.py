"""Models and layers: their subclasses of a strategy, how they are built and called."""
