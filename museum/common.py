"""What the scripts share: processes, a small model, and the line that they print.

A script's docstring begins with its claim in a line and a story of a few; its last
paragraph has the fields `Framework`, `Reported`, `Link`, `Number`, and, where they are
needed, `Published`, `Re-enacted` and `Upstream`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np

#: Framework: its package on PyPI, and the backend that the script needs.
FRAMEWORKS = {
    "DDP": ("torch", "torch"),
    "FSDP2": ("torch", "torch"),
    "data loaders": ("torch", "torch"),
    "Accelerate": ("accelerate", "torch"),
    "Transformers": ("transformers", "torch"),
    "Lightning": ("lightning", "torch"),
    "torchmetrics": ("torchmetrics", "torch"),
    "tf.distribute": ("tensorflow", "tensorflow"),
    "keras.distribution": ("keras", "torch"),
    "JAX": ("jax", "jax"),
    "Flax": ("flax", "jax"),
}
#: Relative difference from which on two numbers are different ones.
TOLERANCE = 1e-4


def fields(doc: str) -> dict[str, str]:
    """The fields of a docstring, `Title` and `Story` among them."""
    *text, last = re.split(r"\n\s*\n", doc.strip())
    found = re.findall(r"^([A-Z][\w-]+): ((?:.+\n?)(?:  .+\n?)*)", last + "\n", re.M)
    about = {key: " ".join(value.split()) for key, value in found}
    missing = {"Framework", "Reported", "Link", "Number"} - set(about)
    if missing:
        raise ValueError(f"A docstring without {sorted(missing)}: {doc}")
    story = " ".join("\n".join(text[1:]).split())
    return {"Title": text[0].strip(), "Story": story, **about}


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def exhibit(
    doc: str | None,
    framework: Callable[[], Any],
    one_device: Callable[[], Any],
    ours: Callable[[], Any],
) -> None:
    """Measures three numbers and prints them as a line of JSON.

    Args:
        doc: the script's docstring.
        framework: returns the number that the framework gives, or, where it is not
            installed, the same mistake by hand.
        one_device: returns the number of one device.
        ours: returns the number of `keras_strategies`.
    """
    about = fields(doc or "")
    package, _ = FRAMEWORKS[about["Framework"]]
    # The framework first: its processes are forked from one that has computed nothing.
    numbers = {
        name: float(np.asarray(measured()).reshape(()))
        for name, measured in [
            ("framework", framework),
            ("one_device", one_device),
            ("ours", ours),
        ]
    }
    differs = not np.isclose(
        numbers["framework"], numbers["one_device"], rtol=TOLERANCE, atol=1e-7
    )
    state = "alive" if differs else "mended"
    if "Re-enacted" in about:
        state = "re-enacted" if differs else "not shown"
    print(json.dumps({**numbers, "state": state, "version": installed(package)}))


def exhibit_ranks(
    doc: str | None, step: Callable[[int, int], Any], ours: Callable[[], Any]
) -> None:
    """As `exhibit`; the framework's numbers are those of rank 0 of two and of one.

    Args:
        doc: the script's docstring.
        step: returns a number, from the rank of a process and the number of processes.
        ours: returns the number of `keras_strategies`.
    """
    exhibit(
        doc, lambda: on_processes(step, 2)[0], lambda: on_processes(step, 1)[0], ours
    )


def exhibit_devices(
    doc: str | None, step: Callable[[list[Any]], Any], ours: Callable[[], Any]
) -> None:
    """As `exhibit`; the framework's numbers are those of two devices and of one.

    Args:
        doc: the script's docstring.
        step: returns a number, or one for each device, of which the first is shown;
            from the devices of JAX, or the names of those of TensorFlow.
        ours: returns the number of `keras_strategies`.
    """
    import keras_strategies as ks

    ks.set_virtual_cpu_devices(2)
    two, one = ([*devices()[:count]] for count in (2, 1))
    exhibit(doc, lambda: np.ravel(step(two))[0], lambda: np.ravel(step(one))[0], ours)


def devices() -> list[Any]:
    """The devices of JAX, or the names of those of TensorFlow."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return jax.devices()
    import tensorflow as tf

    return [each.name for each in tf.config.list_logical_devices("CPU")]


def exhibit_scopes(
    doc: str | None, train: Callable[[contextlib.AbstractContextManager[Any]], Any]
) -> None:
    """As `exhibit`, with the same Keras code in `tf.distribute`, in none, and in ours.

    Args:
        doc: the script's docstring.
        train: returns a number, from a scope that it enters to make a model.
    """
    exhibit(
        doc,
        lambda: train(tensorflow_replicas().scope()),
        lambda: train(contextlib.nullcontext()),
        lambda: train(two_replicas().scope()),
    )


def on_processes(function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `function(rank, count, *args)` returns in processes joined by gloo."""
    import torch.distributed as dist

    context = multiprocessing.get_context("fork")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe()
        arguments = (function, rank, count, store.port, theirs, args)
        processes.append(context.Process(target=_rank, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return [pipe.recv() for pipe in pipes]
    except EOFError:
        raise RuntimeError("A process ended without a result; see its error.") from None
    finally:
        for process in processes:
            process.join(20)
            process.kill()


def _rank(
    function: Callable[..., Any],
    rank: int,
    count: int,
    port: int,
    pipe: Any,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    # What torchrun sets.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    result = function(rank, count, *args)
    dist.barrier()
    pipe.send(result)
    dist.destroy_process_group()


def linear(
    shape: tuple[int, ...] = (1,), outputs: int = 1, rate: Any = 0.1, **compiled: Any
) -> Any:
    """A Keras model `y = w x` with `w = 1`, compiled with SGD of a rate."""
    import keras

    layer = keras.layers.Dense(outputs, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input(shape), layer])
    model.compile(keras.optimizers.SGD(rate), **compiled)
    return model


def torch_linear(wrap: Callable[[Any], Any] = lambda model: model) -> tuple[Any, Any]:
    """The same in Torch, wrapped as by DDP, and its optimizer."""
    import torch

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    wrapped = wrap(model)
    return wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1)


def tensorflow_replicas() -> Any:
    """A strategy of `tf.distribute` over two logical CPU devices."""
    import tensorflow as tf

    import keras_strategies as ks

    ks.set_virtual_cpu_devices(2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def two_replicas() -> Any:
    """A strategy of two virtual CPU devices."""
    import keras_strategies as ks

    return ks.MirroredStrategy(["cpu:0", "cpu:1"])


def our_weight(x: Any, y: Any, loss: Any = "mse", **weights: Any) -> Any:
    """The weight of `linear` after a step of a batch on two replicas.

    Args:
        x, y: arrays of shape (rows, 1); y may have more columns.
        loss: as for `compile`.
        weights: `sample_weight`, or nothing.
    """
    with two_replicas().scope():
        model = linear(x.shape[1:], y.shape[-1], loss=loss)
    model.train_on_batch(x, y, **weights)
    return model.get_weights()[0]


def our_epoch(*data: Any, **options: Any) -> Any:
    """The weight of `linear` after an epoch of `fit` on two replicas."""
    with two_replicas().scope():
        model = linear(loss="mse")
    model.fit(*data, shuffle=False, verbose=0, **options)
    return model.get_weights()[0]


def our_metric(x: Any, y: Any, metric: Any = "mse", **options: Any) -> float:
    """A metric of `linear` on two replicas; `options` are those of `evaluate`."""
    with two_replicas().scope():
        model = linear(loss="mse", metrics=[metric])
    return model.evaluate(x, y, verbose=0, **options)[1]


def our_rows(loader: Any) -> list[Any]:
    """The parts of batches that two replicas get from a loader."""
    strategy = two_replicas()
    data = strategy.experimental_distribute_dataset(loader)
    return [part for x in data for part in strategy.experimental_local_results(x)]


def our_batch_norm(x: Any) -> tuple[float, float]:
    """Moving mean and variance after a batch on two replicas, from 0 and 1."""
    import keras

    with two_replicas().scope():
        layer = keras.layers.BatchNormalization(momentum=0.9)
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile("sgd", "mse")
    model.train_on_batch(x, x)
    mean, variance = layer.moving_mean, layer.moving_variance
    return float(mean[0]), float(variance[0])
