"""All uses of Keras beyond its public interface.

Tested with Keras 3.15 and 3.16. Docstrings name the symbols that a function relies on.

`manifest` lists the attributes that are replaced, `private_names` those that are used.
`models/strategy_trainer.py` has private methods that models of a strategy replace.
"""
