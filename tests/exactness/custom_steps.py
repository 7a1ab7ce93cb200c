"""Models with steps of their own, as a user would write them for each backend."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

BACKEND = keras.backend.backend()


class StepModel(keras.Model):
    """Trains players, each a list of variables with a loss of its own.

    Subclasses give `players()`, a list of lists of variables, and
    `objectives(data, training)`, a loss for each player and a dictionary of logs.
    One optimizer applies all gradients. The steps below are the ones of Keras's
    guides "Customizing what happens in fit()" for the three backends.
    """

    def players(self) -> list[list[Any]]:
        raise NotImplementedError

    def objectives(self, data: Any, training: bool) -> tuple[list[Any], dict[str, Any]]:
        raise NotImplementedError

    def _apply(self, gradients: list[list[Any]]) -> None:
        variables = [v for player in self.players() for v in player]
        self.optimizer.apply([g for part in gradients for g in part], variables)


def _torch_train_step(self: StepModel, data: Any) -> dict[str, Any]:
    import torch

    losses, logs = self.objectives(data, True)
    gradients = []
    for loss, player in zip(losses, self.players(), strict=True):
        values = [v.value for v in player]
        gradients.append(torch.autograd.grad(loss, values, retain_graph=True))
    with torch.no_grad():
        self._apply(gradients)
    return {name: value.detach() for name, value in logs.items()}


def _tensorflow_train_step(self: StepModel, data: Any) -> dict[str, Any]:
    import tensorflow as tf

    with tf.GradientTape(persistent=True) as tape:
        losses, logs = self.objectives(data, True)
    gradients = [
        tape.gradient(loss, [v.value for v in player])
        for loss, player in zip(losses, self.players(), strict=True)
    ]
    self._apply(gradients)
    return logs


def _jax_train_step(self: StepModel, state: Any, data: Any) -> Any:
    import jax

    trainable, non_trainable, optimizer, metrics = state
    gradients: dict[int, Any] = {}
    for number, player in enumerate(self.players()):

        def loss_of(values: Any, number: int = number) -> Any:
            mapping = [
                *zip(self.trainable_variables, values, strict=True),
                *zip(self.non_trainable_variables, non_trainable, strict=True),
            ]
            with keras.StatelessScope(state_mapping=mapping) as scope:
                losses, logs = self.objectives(data, True)
            after = [
                scope.get_current_value(v)
                if scope.get_current_value(v) is not None
                else o
                for v, o in zip(
                    self.non_trainable_variables, non_trainable, strict=True
                )
            ]
            return losses[number], (logs, after)

        found, (logs, after) = jax.grad(loss_of, has_aux=True)(trainable)
        own = {id(v) for v in player}
        for variable, gradient in zip(self.trainable_variables, found, strict=True):
            if id(variable) in own:
                gradients[id(variable)] = gradient
    trainable, optimizer = self.optimizer.stateless_apply(
        optimizer, [gradients[id(v)] for v in self.trainable_variables], trainable
    )
    return logs, (trainable, after, optimizer, metrics)


def _test_step(self: StepModel, data: Any) -> dict[str, Any]:
    return self.objectives(data, False)[1]


def _jax_test_step(self: StepModel, state: Any, data: Any) -> Any:
    trainable, non_trainable, metrics = state
    mapping = [
        *zip(self.trainable_variables, trainable, strict=True),
        *zip(self.non_trainable_variables, non_trainable, strict=True),
    ]
    with keras.StatelessScope(state_mapping=mapping):
        logs = self.objectives(data, False)[1]
    return logs, (trainable, non_trainable, metrics)


if BACKEND == "torch":
    StepModel.train_step = _torch_train_step
    StepModel.test_step = _test_step
elif BACKEND == "tensorflow":
    StepModel.train_step = _tensorflow_train_step
    StepModel.test_step = _test_step
elif BACKEND == "jax":
    StepModel.train_step = _jax_train_step
    StepModel.test_step = _jax_test_step


class CustomLoss(StepModel):
    """One call of the model itself, and a loss that looks at the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.out = layers.Dense(2)

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.norm.build((None, 8))
        self.out.build((None, 8))
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.norm(self.hidden(inputs), training=training))

    def players(self) -> list[list[Any]]:
        return [self.trainable_variables]

    def objectives(self, data: Any, training: bool) -> tuple[list[Any], dict[str, Any]]:
        x, y = data
        y_pred = self(x, training=training)
        error = ops.mean(ops.square(y_pred - y))
        # The spread over the batch is no sum of parts.
        loss = error + 0.1 * ops.sqrt(ops.var(y_pred) + 1e-3)
        return [loss], {"loss": loss, "error": error}


class AutoEncoder(StepModel):
    """Submodels that are called one after the other, as in a VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        self.decoder = keras.Sequential(
            [keras.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(6)]
        )
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.decoder(self.encoder(inputs)[:, :2])

    def players(self) -> list[list[Any]]:
        return [self.trainable_variables]

    def objectives(self, data: Any, training: bool) -> tuple[list[Any], dict[str, Any]]:
        x, _ = data
        code = self.encoder(x, training=training)
        mean, log_variance = code[:, :2], code[:, 2:]
        # In place of noise, which is different on replicas, something known.
        sample = mean + ops.exp(0.5 * log_variance) * x[:, :2]
        found = self.decoder(sample, training=training)
        rebuilt = ops.mean(ops.sum(ops.square(x - found), axis=1))
        divergence = -0.5 * ops.mean(
            1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        )
        loss = rebuilt + divergence
        return [loss], {"loss": loss, "rebuilt": rebuilt, "divergence": divergence}


class TwoPlayers(StepModel):
    """A generator and a discriminator, each with its own loss, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(2)]
        )
        self.judge = keras.Sequential(
            [keras.Input((2,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.judge(self.generator(inputs))

    def players(self) -> list[list[Any]]:
        return [self.generator.trainable_variables, self.judge.trainable_variables]

    def objectives(self, data: Any, training: bool) -> tuple[list[Any], dict[str, Any]]:
        x, real = data
        made = self.generator(x, training=training)
        on_made = self.judge(made, training=training)
        on_real = self.judge(real, training=training)
        fooled = ops.mean(ops.softplus(-on_made))
        caught = ops.mean(ops.softplus(on_made)) + ops.mean(ops.softplus(-on_real))
        return [fooled, caught], {"fooled": fooled, "caught": caught}


class SpreadOfTheBatch(keras.Model):
    """A `predict_step` and a `test_step` of its own around the usual training."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(2)

    def build(self, shape: Any) -> None:
        self.out.build(shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)


def _twice(outputs: Any) -> dict[str, Any]:
    return {"once": outputs, "centered": outputs - ops.mean(outputs, axis=0)}


if BACKEND == "jax":

    def _predict_step(self: Any, state: Any, data: Any) -> Any:
        trainable, non_trainable = state
        x = data[0] if isinstance(data, tuple) else data
        outputs, non_trainable = self.stateless_call(trainable, non_trainable, x)
        return _twice(outputs), non_trainable

else:

    def _predict_step(self: Any, data: Any) -> Any:
        return _twice(self(data[0] if isinstance(data, tuple) else data))


SpreadOfTheBatch.predict_step = _predict_step


class CustomSteps(CustomLoss):
    """All three steps are its own."""


CustomSteps.predict_step = _predict_step
