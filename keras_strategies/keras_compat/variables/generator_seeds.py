"""Seeds of generators and initializers."""

from __future__ import annotations

from typing import Any


def seed_offset(variable: Any, replica_id: int) -> int:
    """The offset of the first element of a seed state on one replica.

    The states of `keras.random.SeedGenerator` are `[seed, count]`, named
    `seed_generator_state`; Torch seeds with their sum, so the offsets of replicas
    lie far apart (multiples of 2^31 / the golden ratio), not side by side.
    Any other variable has the offset 0.
    """
    if variable.name != "seed_generator_state":
        return 0
    return (replica_id * 1_327_217_885) % 2**31


def seed_states(model: Any) -> list[Any]:
    """The variables of a model's seed generators.

    Keras 3.15: `SeedGenerator.state` is a variable of this name. Keras saves the
    variables of layers, and these are of generators.
    """
    return [v for v in model.variables if v.name == "seed_generator_state"]


def set_initializer_seed(initializer: Any, seed: int) -> None:
    """Changes the seed of an initializer, also the one in its config.

    Keras 3.15: `RandomInitializer._init_seed`.
    """
    initializer.seed = initializer._init_seed = seed
