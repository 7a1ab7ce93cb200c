"""Row proofs on Torch: recorded operations of a layer call, and rules for each."""
