"""A recommender with tables of users and items on parameter servers.

    KERAS_BACKEND=jax python examples/recommender.py
    KERAS_BACKEND=torch python examples/recommender.py --workers 4 --ps 2
    kubectl apply -f examples/kubernetes/parameter_servers.yaml

In a cluster, each task runs it: servers and workers serve the chief, which trains.

Clicks are generated from tastes that nobody tells the model: each user and each item
has a few hidden numbers, and a user clicks on what is like him. Two towers, one for
users and one for items, have to find them again; the area under the curve (AUC) of
pairs that were never shown says how well they did.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
from keras import layers

import keras_strategies as ks

USERS, ITEMS, TASTES = 4000, 1500, 4


def hidden_tastes(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What the model is to find: a vector of length 1 for each user and each item."""
    random = np.random.default_rng(seed)
    users = random.normal(size=(USERS, TASTES))
    items = random.normal(size=(ITEMS, TASTES))
    return tuple(x / np.linalg.norm(x, axis=1, keepdims=True) for x in (users, items))


def clicks(rows: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pairs of a user and an item, and whether the user clicked, `(rows, 1)`."""
    random = np.random.default_rng(seed)
    users, items = hidden_tastes()
    user = random.integers(0, USERS, rows, dtype="int32")
    item = random.integers(0, ITEMS, rows, dtype="int32")
    likes = np.sum(users[user] * items[item], axis=1)
    clicked = random.random(rows) < 1 / (1 + np.exp(-12 * likes))
    pairs = {"user": user[:, None], "item": item[:, None]}
    return pairs, clicked.astype("float32")[:, None]


def tower(name: str, count: int, width: int) -> tuple[keras.KerasTensor, ...]:
    """The input of a tower, and its vector."""
    number = keras.Input((1,), dtype="int32", name=name)
    row = layers.Flatten()(layers.Embedding(count, width, name=f"{name}s")(number))
    hidden = layers.Dense(32, activation="relu", name=f"{name}_hidden")(row)
    return number, layers.Dense(width, name=f"{name}_vector")(hidden) + row


def two_towers(width: int = 16) -> keras.Model:
    """A compiled model of a pair's click."""
    user, user_vector = tower("user", USERS, width)
    item, item_vector = tower("item", ITEMS, width)
    score = layers.Dot(1)([user_vector, item_vector])
    model = keras.Model({"user": user, "item": item}, score)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def liked_among_recommended(
    model: keras.Model, users: int = 20, top: int = 10
) -> float:
    """The share of the items that the model puts first which their users do like."""
    user = np.repeat(np.arange(users, dtype="int32"), ITEMS)[:, None]
    item = np.tile(np.arange(ITEMS, dtype="int32"), users)[:, None]
    scores = model.predict({"user": user, "item": item}, batch_size=6000, verbose=0)
    best = np.argsort(-scores.reshape(users, ITEMS), axis=1)[:, :top]
    tastes_of_users, tastes_of_items = hidden_tastes()
    likes = tastes_of_users[:users] @ tastes_of_items.T
    return float(np.mean(np.take_along_axis(likes, best, axis=1) > 0))


def serve(resolver: ks.cluster_resolver.ClusterResolver, backup: str | None) -> None:
    """Runs a worker or a parameter server until the chief ends."""
    if backup is None:
        ks.Server(resolver).join()
        return
    folder = str(Path(backup) / "servers")
    ks.Server(resolver, snapshot_folder=folder, snapshot_seconds=30).join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1, help="parameter servers")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--backup", help="a folder, to go on where a run was ended")
    options = parser.parse_args()

    resolver = ks.cluster_resolver.find_cluster()
    if resolver is None:
        resolver = ks.cluster_resolver.LocalClusterResolver(options.workers, options.ps)
    elif resolver.task_type != "chief":
        serve(resolver, options.backup)
        return

    keras.utils.set_random_seed(0)
    servers = resolver.cluster_spec().num_tasks("ps")
    partitioner = ks.experimental.partitioners.FixedShardsPartitioner(servers)
    callbacks = []
    if options.backup:
        backup = Path(options.backup) / "training"
        callbacks.append(keras.callbacks.BackupAndRestore(str(backup)))
    with ks.ParameterServerStrategy(resolver, partitioner) as strategy:
        print(f"{strategy!r} with the backend {keras.backend.backend()}")
        with strategy.scope():
            model = two_towers()
        pairs, clicked = clicks(options.rows, seed=1)
        model.fit(
            pairs,
            clicked,
            batch_size=1000,
            epochs=options.epochs,
            callbacks=callbacks,
            verbose=2,
        )

        pairs, clicked = clicks(20_000, seed=2)
        found = model.evaluate(
            pairs, clicked, batch_size=2000, verbose=0, return_dict=True
        )
        print(f"AUC of clicks that were never shown: {found['auc']:.3f}")
        share = liked_among_recommended(model)
        print(f"users like {share:.0%} of what is recommended to them")
        print(ks.ClusterCoordinator(strategy).status())


if __name__ == "__main__":
    main()
