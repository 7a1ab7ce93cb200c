"""Other ways than `manifest` to change what belongs to others, or to look into it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Intrusion:
    """A way to change objects of others, or to look into them.

    Args:
        module: str, the module of this package.
        kind: str, `"class"` for objects that get another class, `"function"` for
            functions of modules that are replaced, `"sockets"` for those that the
            system lists, `"text"` for messages of errors and warnings that are
            searched.
        why: str, the reason.
    """

    module: str
    kind: str
    why: str


INTRUSIONS = (
    Intrusion(
        "training.strategy_model",
        "class",
        "A model of a strategy has methods that call the hooks.",
    ),
    Intrusion(
        "keras_compat.saving.mapped_tensors",
        "function",
        "keras_hub reads entire tensors with `safetensors.safe_open`.",
    ),
    Intrusion(
        "keras_compat.optimizers.optimizer_classes",
        "class",
        "Optimizers without the methods of `TFOptimizer`, and of the public classes "
        "while they are pickled.",
    ),
    Intrusion(
        "keras_compat.variables.strategy_variables",
        "class",
        "A variable of a strategy notices assignments.",
    ),
    Intrusion(
        "keras_compat.variables.hosted_variables",
        "class",
        "The value of a variable is on parameter servers.",
    ),
    Intrusion(
        "keras_compat.variables.materialized",
        "class",
        "Variables on parameter servers are ordinary ones while a model is exported.",
    ),
    Intrusion(
        "keras_compat.variables.values",
        "class",
        "Each read of a variable is checked.",
    ),
    Intrusion(
        "keras_compat.variables.creation",
        "class",
        "A base class in front of that of a variable.",
    ),
    Intrusion(
        "engines.tensorflow.replicas.mirrored_variables",
        "class",
        "A `tf.Variable` has copies on other devices.",
    ),
    Intrusion(
        "engines.tensorflow.compat.operations",
        "function",
        "Kernels that fail on zero rows, and draws of a replica's rows.",
    ),
    Intrusion(
        "keras_compat.recorded_calls",
        "function",
        "Replicas note what they call, and exchange sums, from the first call that is "
        "proved on.",
    ),
    Intrusion(
        "engines.engine_sockets",
        "sockets",
        "Connections of an engine to lost workers are shut down.",
    ),
    Intrusion(
        "engines.tensorflow.workers.worker_server",
        "sockets",
        "The server of a worker listens on the address of the cluster only.",
    ),
    Intrusion(
        "engines.jax.run.refused_functions",
        "text",
        "JAX's and Python's errors for a tensor as a shape or a key are `TypeError`s.",
    ),
    Intrusion(
        "engines.jax.workers.jax_workers",
        "text",
        "JAX raises one class of error for collectives and for programs.",
    ),
    Intrusion(
        "engines.tensorflow.replicas.lockstep_replicas",
        "text",
        "TensorFlow's error for replicas that make different collective calls; what it "
        "logs of its strategies is not ours.",
    ),
    Intrusion(
        "engines.tensorflow.workers.worker_collectives",
        "text",
        "TensorFlow raises classes of errors for collectives that others have too.",
    ),
    Intrusion(
        "keras_compat.models.building",
        "text",
        "Keras's `predict` without a batch raises Python's error for a local of it.",
    ),
    Intrusion(
        "processes.ray.actors",
        "text",
        "The last line of a traceback in Ray's error says why an actor ended.",
    ),
)
