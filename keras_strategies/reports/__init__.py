"""Text reports: tables, meshes, and the plan and placement of a model."""
