"""Resolvers that query a service for machines."""
