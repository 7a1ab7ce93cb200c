"""Resolvers that read environment variables, one file for each kind of launcher."""
