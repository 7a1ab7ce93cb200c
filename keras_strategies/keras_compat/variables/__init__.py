"""Variables: their values, creation and subclasses."""
