"""Random numbers of a replica's rows, and the generators of replicas."""
