"""Base class of strategies: its methods, by subject."""
