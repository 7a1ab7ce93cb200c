"""Other ways to update: accumulation, SAM, centralized gradients, policies."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from harness.data import Data
from keras import layers, ops

from field.compare import FieldCase
from field.recipes.common import (
    convolutional,
    crossentropy,
    digits,
    losses_of,
    perceptron,
    random_rows,
    ready,
    sgd,
)
from field.steps import StepModel, input_gradients, value_and_gradients


class Classifier(StepModel):
    """A network of digits and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convolutional(10)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.net(x, training=training)

    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.mean(losses_of(y, self(x, training=True)))


class Accumulates(Classifier):
    """Applies the sum of the gradients of two batches at each second one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.net.trainable_variables
        ]

    def step(self, data: Any) -> dict[str, Any]:
        variables = self.net.trainable_variables
        loss, gradients = value_and_gradients(lambda: self.loss_of(*data), variables)
        self.calls.assign(self.calls + 1)
        now = ops.cast(self.calls % 2 == 0, "float32")
        sums = [s + g for s, g in zip(self.sums, gradients, strict=True)]
        self.apply([total * now for total in sums], variables)
        for variable, total in zip(self.sums, sums, strict=True):
            variable.assign(ops.stop_gradient(total * (1 - now)))
        return {"objective": loss}


class SharpnessAware(Classifier):
    """SAM: the gradient at the worst point nearby."""

    def step(self, data: Any) -> dict[str, Any]:
        variables = self.trainable_variables
        _, gradients = value_and_gradients(lambda: self.loss_of(*data), variables)
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        before = [ops.stop_gradient(ops.copy(v.value)) for v in variables]
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(ops.stop_gradient(variable + 0.05 * gradient / norm))
        loss, gradients = value_and_gradients(lambda: self.loss_of(*data), variables)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        self.apply(gradients, variables)
        return {"objective": loss}


@keras.saving.register_keras_serializable("tests")
class Centralized(keras.optimizers.SGD):
    """Subtracts from each gradient its mean over all axes but the last."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        centered = [
            g - ops.mean(g, axis=tuple(range(len(g.shape) - 1)), keepdims=True)
            if len(g.shape) > 1
            else g
            for g in grads
        ]
        super().apply(centered, trainable_variables)


def gradient_centralization() -> keras.Model:
    return ready(convolutional(10), Centralized(0.05, momentum=0.9), crossentropy())


class Adversarial(Classifier):
    """Trains on images moved along the sign of the loss's gradient (FGSM).

    It also has variables without a gradient, those of another network.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = convolutional(10, norm=False)

    def step(self, data: Any) -> dict[str, Any]:
        x, y = data
        # Smooth, because signs of gradients near zero are no rounding.
        slopes = ops.stop_gradient(input_gradients(lambda x: self.loss_of(x, y), x))
        worse = x + 0.1 * ops.tanh(100.0 * slopes)
        return self.minimized(lambda: self.loss_of(x, y) + self.loss_of(worse, y))


class Dream(StepModel):
    """Learns an image that excites a fixed network, with a smoothness penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convolutional(10, norm=False)
        self.net.trainable = False
        self.change = self.add_weight(shape=(1, 8, 8, 1), initializer="random_normal")

    def objective(self, data: Any) -> Any:
        x, y = data
        image = x + self.change
        excited = ops.take_along_axis(self.net(image), y[:, None], axis=1)
        rough = ops.mean(ops.square(image[:, 1:] - image[:, :-1]))
        return rough - ops.mean(ops.square(excited))


class Mixup(Classifier):
    """Each image is mixed with another one of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(2)

    def step(self, data: Any) -> dict[str, Any]:
        x, y = data
        share = keras.random.beta((ops.shape(x)[0], 1), 0.4, 0.4, seed=self.seed)
        mixed = share[:, :, None, None] * x
        mixed = mixed + (1 - share[:, :, None, None]) * ops.flip(x, axis=0)
        labels = ops.one_hot(y, 10)
        labels = share * labels + (1 - share) * ops.flip(labels, axis=0)

        def loss() -> Any:
            logits = self(mixed, training=True)
            losses = keras.losses.categorical_crossentropy(
                labels, logits, from_logits=True
            )
            return ops.mean(losses)

        return self.minimized(loss)


class PPO(StepModel):
    """A clipped policy update and a critic, each with its own loss."""

    def step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        observation, action = x["observation"], x["action"]
        advantage = x["reward"] - ops.stop_gradient(self.critic(observation))[:, 0]
        advantage = (advantage - ops.mean(advantage)) / (ops.std(advantage) + 1e-3)

        def policy_loss() -> Any:
            chances = ops.log_softmax(self.actor(observation))
            taken = ops.take_along_axis(chances, action[:, None], axis=1)[:, 0]
            ratio = ops.exp(taken - x["log_chance"])
            clipped = ops.clip(ratio, 0.8, 1.2)
            gain = ops.minimum(ratio * advantage, clipped * advantage)
            entropy = -ops.sum(ops.exp(chances) * chances, axis=-1)
            return -ops.mean(gain) - 0.01 * ops.mean(entropy)

        def value_loss() -> Any:
            values = self.critic(observation)[:, 0]
            return ops.mean(ops.square(values - x["reward"]))

        policy = self.minimize(policy_loss, self.actor.trainable_variables)
        value = self.minimize(value_loss, self.critic.trainable_variables)
        return {"policy": policy, "value": value}


def episodes(rows: int) -> Data:
    random = np.random.default_rng(0)
    x = {
        "observation": random_rows(rows, 6),
        "action": random.integers(0, 3, rows).astype("int32"),
        "reward": random_rows(rows, seed=1),
        "log_chance": np.log(random.uniform(0.2, 0.6, rows)).astype("float32"),
    }
    return Data(x, np.zeros(rows, "float32"))


class ActorCritic(StepModel):
    """Discounted returns of an episode: each row depends on those behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron(8, 8, inputs=6)
        self.actor, self.critic = layers.Dense(3), layers.Dense(1)
        self.actor.build((None, 8))
        self.critic.build((None, 8))

    def objective(self, data: Any) -> Any:
        x, _ = data
        rows = ops.shape(x["reward"])[0]
        apart = ops.arange(rows)[None] - ops.arange(rows)[:, None]
        apart = ops.cast(apart, "float32")
        discount = ops.where(apart >= 0, 0.9 ** ops.maximum(apart, 0.0), 0.0)
        returns = ops.sum(discount * x["reward"][None], axis=1)
        hidden = self.body(x["observation"])
        chances = ops.log_softmax(self.actor(hidden))
        taken = ops.take_along_axis(chances, x["action"][:, None], axis=1)[:, 0]
        better = returns - self.critic(hidden)[:, 0]
        actor = -ops.sum(taken * ops.stop_gradient(better))
        return actor + ops.sum(ops.square(better))


def ppo() -> keras.Model:
    nets = {
        name: perceptron(16, n, inputs=6) for name, n in (("actor", 3), ("critic", 1))
    }
    return ready(PPO(**nets))


CASES = [
    FieldCase("gradient_accumulation", lambda: ready(Accumulates()), digits),
    FieldCase("sam", lambda: ready(SharpnessAware()), digits),
    FieldCase("gradient_centralization", gradient_centralization, digits),
    FieldCase("adversarial", lambda: ready(Adversarial()), digits),
    FieldCase("dream", lambda: ready(Dream(), sgd(1.0)), digits),
    FieldCase("mixup", lambda: ready(Mixup()), digits),
    FieldCase("ppo", ppo, episodes),
    FieldCase("actor_critic", lambda: ready(ActorCritic(), sgd(0.01)), episodes),
]
