"""The coordinator's variables: numbers, placement, sharding and initial values."""
