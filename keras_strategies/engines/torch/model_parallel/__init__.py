"""Variables as DTensors over a mesh of processes."""
