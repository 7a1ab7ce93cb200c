"""Training recipes of the kinds that Keras's examples show, each of them tiny."""

from field.recipes import (
    generative,
    mixing,
    optimization,
    representation,
    sequences,
    structured,
)

CASES = [
    *generative.CASES,
    *representation.CASES,
    *sequences.CASES,
    *structured.CASES,
    *optimization.CASES,
    *mixing.CASES,
]
