"""Row placements propagated over the graph of a layer call and its backward pass."""
