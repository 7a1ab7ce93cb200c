"""`Strategy.run`: replicas traced into one program."""
