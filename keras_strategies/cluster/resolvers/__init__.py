"""Cluster resolvers, one file for each kind of cluster."""
