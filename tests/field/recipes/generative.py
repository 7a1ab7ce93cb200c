"""GANs, autoencoders, diffusion, flows: models that learn a distribution."""

from __future__ import annotations

from typing import Any

import keras
from harness.training import ADAM_TOLERANCE
from keras import layers, ops

from field.compare import FieldCase
from field.recipes.common import (
    convolutional,
    digits,
    images_only,
    images_twice,
    perceptron,
    ready,
    sgd,
    stack,
)
from field.steps import StepModel, input_gradients

NOISE = 4


def binary(labels: Any, logits: Any) -> Any:
    found = keras.losses.binary_crossentropy(labels, logits, from_logits=True)
    return ops.mean(found)


def painter(noise: int = NOISE) -> keras.Model:
    """A generator of images (8, 8, 1)."""
    return stack(
        (noise,),
        layers.Dense(2 * 2 * 8),
        layers.Reshape((2, 2, 8)),
        layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
        layers.LeakyReLU(),
        layers.Conv2DTranspose(1, 4, strides=2, padding="same"),
        layers.Activation("sigmoid"),
    )


class GAN(StepModel):
    """Each player has an optimizer, `fit`'s is the generator's.

    Noise is drawn in the step.
    """

    def __init__(self) -> None:
        critic_optimizer = keras.optimizers.Adam(3e-3, epsilon=1e-4)
        super().__init__(other_optimizers=(critic_optimizer,))
        self.generator, self.critic = painter(), critic()
        self.seed = keras.random.SeedGenerator(3)
        critic_optimizer.build(self.critic.trainable_variables)

    @property
    def trainable_variables(self) -> list[Any]:
        return self.generator.trainable_variables

    @property
    def non_trainable_variables(self) -> list[Any]:
        return super().non_trainable_variables + self.critic.trainable_variables

    def noise(self, images: Any) -> Any:
        return keras.random.normal((ops.shape(images)[0], NOISE), seed=self.seed)

    def step(self, real: Any) -> dict[str, Any]:
        fake = self.generator(self.noise(real), training=True)
        both = ops.concatenate([ops.stop_gradient(fake), real])
        rows = (ops.shape(real)[0], 1)
        answers = ops.concatenate([ops.ones(rows), ops.zeros(rows)])
        critic = self.minimize(
            lambda: binary(answers, self.critic(both, training=True)),
            self.critic.trainable_variables,
            self.other_optimizers[0],
        )
        code = self.noise(real)
        wanted = ops.zeros(rows)
        generator = self.minimize(
            lambda: binary(wanted, self.critic(self.generator(code, training=True))),
            self.generator.trainable_variables,
        )
        return {"critic": critic, "generator": generator}


class Game(StepModel):
    """A GAN with one optimizer for both players."""

    def __init__(self, critic: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic
        self.seed = keras.random.SeedGenerator(3)

    def trained(self, caught: Any, fooled: Any) -> dict[str, Any]:
        """One update of each player, by its loss."""
        critic = self.minimize(caught, self.critic.trainable_variables)
        generator = self.minimize(fooled, self.generator.trainable_variables)
        return {"critic": critic, "generator": generator}

    def judged(self, code: Any) -> Any:
        """The generator's loss by the critic's answer."""
        return -ops.mean(self.critic(self.generator(code, training=True)))


class ConditionalGAN(Game):
    """Both players see the label: as channels of the image, next to the noise."""

    def step(self, data: Any) -> dict[str, Any]:
        real, labels = data
        label = ops.one_hot(labels, 10)
        noise = keras.random.normal((ops.shape(real)[0], NOISE), seed=self.seed)
        code = ops.concatenate([noise, label], axis=-1)
        channels = ops.ones_like(real) * label[:, None, None, :]

        def judged(images: Any) -> Any:
            return self.critic(ops.concatenate([images, channels], axis=-1))

        def caught() -> Any:
            fake = judged(self.generator(code, training=True))
            true = judged(real)
            of_fake = binary(ops.ones_like(fake), fake)
            return of_fake + binary(ops.zeros_like(true), true)

        def fooled() -> Any:
            fake = judged(self.generator(code, training=True))
            return binary(ops.zeros_like(fake), fake)

        return self.trained(caught, fooled)


class WassersteinGAN(Game):
    """Two steps of the critic with a gradient penalty, one of the generator."""

    def step(self, real: Any) -> dict[str, Any]:
        shape = (ops.shape(real)[0], NOISE)
        for _ in range(2):
            code = keras.random.normal(shape, seed=self.seed)
            fake = ops.stop_gradient(self.generator(code, training=True))
            share = keras.random.uniform((shape[0], 1, 1, 1), seed=self.seed)
            mixed = real + share * (fake - real)

            def loss(fake: Any = fake, mixed: Any = mixed) -> Any:
                slopes = input_gradients(self.critic, mixed)
                norm = ops.sqrt(ops.sum(ops.square(slopes), axis=(1, 2, 3)) + 1e-6)
                distance = ops.mean(self.critic(fake)) - ops.mean(self.critic(real))
                return distance + 10.0 * ops.mean(ops.square(norm - 1.0))

            critic = self.minimize(loss, self.critic.trainable_variables)
        generator = self.minimize(
            lambda: self.judged(code), self.generator.trainable_variables
        )
        return {"critic": critic, "generator": generator}


class HingeGAN(Game):
    """The critic's layers are divided by their spectral norms."""

    def step(self, data: Any) -> dict[str, Any]:
        code = keras.random.normal((ops.shape(data)[0], NOISE), seed=self.seed)
        fake = ops.stop_gradient(self.generator(code, training=True))
        both = ops.concatenate([fake, data])

        def caught() -> Any:
            # In one call: each call with `training=True` changes the kernels.
            found = self.critic(both, training=True)
            rows = ops.shape(data)[0]
            of_fake = ops.mean(ops.relu(1 + found[:rows]))
            return of_fake + ops.mean(ops.relu(1 - found[rows:]))

        return self.trained(caught, lambda: self.judged(code))


def spectral_critic() -> keras.Model:
    normalized = layers.SpectralNormalization
    return stack(
        (8, 8, 1),
        normalized(layers.Conv2D(4, 3, strides=2, padding="same")),
        layers.LeakyReLU(),
        layers.Flatten(),
        normalized(layers.Dense(1, kernel_regularizer="l2")),
    )


class VAE(StepModel):
    """Samples between encoder and decoder; the loss is a sum over pixels."""

    def step(self, data: Any) -> dict[str, Any]:
        noise = keras.random.normal((ops.shape(data)[0], 2), seed=self.seed)

        def loss() -> Any:
            code = self.encoder(data)
            mean, log_variance = code[:, :2], code[:, 2:]
            rebuilt = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
            error = ops.mean(ops.sum(ops.square(rebuilt - data), axis=(1, 2, 3)))
            divergence = -0.5 * ops.mean(
                1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            )
            return error + divergence

        return self.minimized(loss)


class Codebook(layers.Layer):
    """Vector quantization: the nearest code, gradients straight through."""

    def __init__(self, count: int, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.codes = self.add_weight(
            shape=(size, count), initializer="random_normal", name="codes"
        )

    def call(self, inputs: Any) -> Any:
        distances = (
            ops.sum(ops.square(inputs), axis=-1, keepdims=True)
            + ops.sum(ops.square(self.codes), axis=0)
            - 2 * ops.matmul(inputs, self.codes)
        )
        chosen = ops.take(ops.transpose(self.codes), ops.argmin(distances, -1), axis=0)
        commitment = ops.mean(ops.square(ops.stop_gradient(chosen) - inputs))
        moves = ops.mean(ops.square(chosen - ops.stop_gradient(inputs)))
        self.add_loss(0.25 * commitment + moves)
        return inputs + ops.stop_gradient(chosen - inputs)


def vq_vae() -> keras.Model:
    model = keras.Sequential([convolutional(6), Codebook(8, 6), painter(6)])
    return ready(model, loss="mse")


def autoencoder() -> keras.Model:
    model = keras.Sequential([convolutional(8), painter(8)])
    return ready(model, keras.optimizers.Adam(1e-3), "binary_crossentropy")


class Denoiser(StepModel):
    """Removes noise that each step draws."""

    def step(self, data: Any) -> dict[str, Any]:
        noise = 0.3 * keras.random.normal(ops.shape(data), seed=self.seed)
        return self.minimized(
            lambda: ops.mean(ops.abs(self.net(data + noise, training=True) - data))
        )


class Diffusion(StepModel):
    """Predicts the noise of a random time; a second network is the moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(32, 64, inputs=64 + 2)
        self.average = perceptron(32, 64, inputs=64 + 2)
        self.average.set_weights(self.net.get_weights())
        self.average.trainable = False
        self.seed = keras.random.SeedGenerator(1)

    def step(self, data: Any) -> dict[str, Any]:
        images = ops.reshape(data, (-1, 64)) * 2 - 1
        rows = ops.shape(images)[0]
        time = keras.random.uniform((rows, 1), seed=self.seed)
        noise = keras.random.normal((rows, 64), seed=self.seed)
        angle = 0.5 * 3.14159 * time
        signal, share = ops.cos(angle), ops.sin(angle)
        noisy = ops.concatenate([signal * images + share * noise, signal, share], -1)
        found = self.minimize(
            lambda: ops.mean(ops.square(self.net(noisy, training=True) - noise)),
            self.net.trainable_variables,
        )
        for slow, fast in zip(self.average.weights, self.net.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"objective": found}


class Flow(StepModel):
    """RealNVP: coupling layers with alternating masks, and the exact likelihood."""

    def objective(self, data: Any) -> Any:
        x, volume = ops.reshape(data, (-1, 64))[:, 16:24], 0.0
        for number, net in enumerate(self.nets):
            mask = (ops.arange(8) + number) % 2
            mask = ops.cast(mask, "float32")[None]
            found = net(x * mask)
            scale, shift = ops.tanh(found[:, :8]), found[:, 8:]
            x = x * mask + (1 - mask) * (x * ops.exp(scale) + shift)
            volume = volume + ops.sum(scale * (1 - mask), axis=-1)
        log_density = -0.5 * ops.sum(ops.square(x), axis=-1)
        return -ops.mean(log_density + volume)


def critic(channels: int = 1) -> keras.Model:
    return stack(
        (8, 8, channels),
        layers.Conv2D(4, 3, strides=2, padding="same"),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.Dense(1),
    )


def vae() -> keras.Model:
    seed = keras.random.SeedGenerator(5)
    parts = {"encoder": convolutional(4, norm=False), "decoder": painter(2)}
    return ready(VAE(**parts, seed=seed), sgd(0.005))


def denoiser() -> keras.Model:
    net = keras.Sequential([convolutional(8), painter(8)])
    return ready(Denoiser(net=net, seed=keras.random.SeedGenerator(11)))


def flow() -> keras.Model:
    nets = [perceptron(16, 16, inputs=8) for _ in range(4)]
    return ready(Flow(nets=nets), sgd(0.01))


def gan() -> keras.Model:
    return ready(GAN(), keras.optimizers.Adam(3e-3, epsilon=1e-4))


CASES = [
    FieldCase("gan", gan, images_only, tolerance=ADAM_TOLERANCE),
    FieldCase(
        "conditional_gan",
        lambda: ready(ConditionalGAN(critic(11), painter(NOISE + 10))),
        digits,
    ),
    FieldCase(
        "wgan_gp",
        lambda: ready(WassersteinGAN(critic(), painter()), sgd(0.01)),
        images_only,
    ),
    FieldCase(
        "spectral_gan",
        lambda: ready(HingeGAN(spectral_critic(), painter())),
        images_only,
    ),
    FieldCase("vae", vae, images_only),
    FieldCase("vq_vae", vq_vae, images_twice),
    FieldCase("autoencoder", autoencoder, images_twice, tolerance=ADAM_TOLERANCE),
    FieldCase("denoising", denoiser, images_only),
    FieldCase("diffusion", lambda: ready(Diffusion()), images_only),
    FieldCase("real_nvp", flow, images_only),
]
