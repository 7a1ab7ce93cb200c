"""Variables sharded over a mesh: model parallelism and checkpoints."""
