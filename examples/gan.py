"""A small GAN on a ring of points: two models, two optimizers, one custom loop.

    KERAS_BACKEND=torch python examples/gan.py

It prints how far from the circle the generated points are on average, and how many
of twelve sectors they reach: a generator that has collapsed reaches few.
"""

from __future__ import annotations

import argparse
import os

NOISE = 8


def ring(rows, seed):
    """Points of shape (rows, 2) near the circle of radius 1."""
    import numpy as np

    random = np.random.default_rng(seed)
    angle = random.uniform(0, 2 * np.pi, rows)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (points + random.normal(scale=0.03, size=(rows, 2))).astype("float32")


def noise(rows, seed):
    import numpy as np

    return np.random.default_rng(seed).normal(size=(rows, NOISE)).astype("float32")


def players():
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(32, activation="relu"),
            layers.Dense(32, activation="relu"),
            layers.Dense(2),
        ]
    )
    critic = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(64, activation="leaky_relu"),
            layers.Dense(64, activation="leaky_relu"),
            layers.Dense(1),
        ]
    )
    return generator, critic


def train(strategy, steps, batch_size):
    """Trains both players under a strategy; returns the generator."""
    import keras
    from keras import ops

    import keras_strategies as ks

    with strategy.scope():
        generator, critic = players()
        generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
        critic_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5)

    def replica_step(real, seeds):
        def critic_loss():
            wrong = ops.softplus(-critic(real)) + ops.softplus(critic(generator(seeds)))
            return ks.compute_average_loss(wrong[:, 0])

        def generator_loss():
            return ks.compute_average_loss(
                ops.softplus(-critic(generator(seeds)))[:, 0]
            )

        turns = (
            (critic_loss, critic, critic_optimizer),
            (generator_loss, generator, generator_optimizer),
        )
        for loss_fn, player, optimizer in turns:
            variables = player.trainable_variables
            _, gradients = ks.value_and_grad(loss_fn, variables)()
            optimizer.apply(gradients, variables)

    @ks.function
    def step(real, seeds):
        strategy.run(replica_step, args=(real, seeds))

    rows = steps * batch_size
    data = (ring(rows, 1), noise(rows, 2))
    for batch in strategy.experimental_distribute_dataset(data, batch_size=batch_size):
        step(*batch)
    return generator


def quality(points):
    """Mean distance to the circle, and how many of twelve sectors have points."""
    import numpy as np

    distance = np.abs(np.linalg.norm(points, axis=1) - 1).mean()
    angles = np.arctan2(points[:, 1], points[:, 0])
    counts, _ = np.histogram(angles, bins=12, range=(-np.pi, np.pi))
    return float(distance), int((counts >= 5).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=os.environ.get("KERAS_BACKEND", "jax"))
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = arguments.backend

    from keras import ops

    import keras_strategies as ks

    strategy = ks.MirroredStrategy(arguments.devices.split(","))
    generator = train(strategy, arguments.steps, arguments.batch_size)
    points = ops.convert_to_numpy(generator(noise(1000, 3)))
    distance, sectors = quality(points)
    print(f"{arguments.backend}, {strategy}, {arguments.steps} steps")
    print(f"mean distance to the circle: {distance:.3f}; sectors reached: {sectors}/12")


if __name__ == "__main__":
    main()
