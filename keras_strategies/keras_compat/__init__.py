"""All that this package uses of Keras beyond its public interface.

Tested with Keras 3.15 and 3.16. Each function says which symbol it relies on.

What is replaced stands in `manifest`, a row for each attribute. Models of a strategy
are of a subclass (`models/strategy_models.py`); others have Keras's methods.
"""
