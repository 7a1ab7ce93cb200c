"""`Model.fit` and its siblings: one compiled step over a mesh of devices."""
