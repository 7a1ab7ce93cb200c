"""Attributes of Keras that are replaced.

A row has an attribute, its replacement and the reason. `patching` installs the rows of
a group; `tests/keras_compat/test_manifest.py` compares each row with the installed
Keras. Attributes that are used without being replaced are in `private_names`, other
ways to change what belongs to others in `intrusions`.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = ("3.15", "3.16")


@dataclass(frozen=True)
class Patch:
    """An attribute of Keras that is replaced.

    Args:
        owner: str, full name of the class or module that Keras uses, in which
            `{backend}` stands for the backend's name. Versions that name it differently
            are separated by `" | "`.
        name: str, the attribute.
        signature: str, the original's, of several versions likewise.
        around: str, the function of this package that is called instead, as
            `around(original, *args, **kwargs)`: its module and its name.
        why: str, the reason.
        backend: str, the backends that have it, likewise; empty for all.
        versions: tuple of str, the versions of Keras that have it.
    """

    owner: str
    name: str
    signature: str
    around: str
    why: str
    backend: str = ""
    versions: tuple[str, ...] = VERSIONS


@dataclass(frozen=True)
class Group:
    """Patches that are installed together.

    Args:
        when: str, the time in which they are installed.
        patches: tuple of `Patch`.
        is_temporary: bool, whether they are removed before the process ends.
    """

    when: str
    patches: tuple[Patch, ...]
    is_temporary: bool = False


_TRAINER = "keras.src.trainers.trainer.BaseTrainer | keras.src.trainers.trainer.Trainer"
_VARIABLE = "keras.src.backend.common.variables.Variable"
_LAYER = "keras.src.layers.layer.Layer"
_OPTIMIZER = "keras.src.optimizers.base_optimizer.BaseOptimizer"
_LOSS_SCALE = "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer"
_SAVING = "keras.src.saving.saving_lib"
_LOSSES = "keras.src.losses.loss"
_JAX = "keras.src.backend.jax"
_TENSORFLOW = "keras.src.backend.tensorflow"
_TORCH = "keras.src.backend.torch"
# Keras calls functions of the backend, and of some of its modules, by their names here.
#: From Keras 3.16 on, functions are in `ops`.
_BACKENDS_OPS = "keras.src.backend.ops"
_BACKENDS = f"keras.src.backend | {_BACKENDS_OPS}"
_BACKEND = "keras.src.backend.{backend}"
_APPLY = "(self, grads, trainable_variables=None)"
# Functions of `keras.random` that draw.
_DRAWS = (
    ("normal", "(shape, mean=0.0, stddev=1.0, dtype=None, seed=None)"),
    ("uniform", "(shape, minval=0.0, maxval=1.0, dtype=None, seed=None)"),
    (
        "categorical",
        "(logits, num_samples, dtype='int32', seed=None) | "
        "(logits, num_samples, dtype='int64', seed=None)",
    ),
    ("randint", "(shape, minval, maxval, dtype='int32', seed=None)"),
    ("truncated_normal", "(shape, mean=0.0, stddev=1.0, dtype=None, seed=None)"),
    ("dropout", "(inputs, rate, noise_shape=None, seed=None)"),
    ("gamma", "(shape, alpha, dtype=None, seed=None)"),
    ("binomial", "(shape, counts, probabilities, dtype=None, seed=None)"),
    ("beta", "(shape, alpha, beta, dtype=None, seed=None)"),
    ("shuffle", "(x, axis=0, seed=None)"),
)

GROUPS: dict[str, Group] = {
    "strategies": Group(
        "From the first scope, `run` or distributed dataset on.",
        (
            Patch(
                _TRAINER,
                "__init__",
                "(self)",
                "hooks.trainer_init",
                "A model that is made in a scope is recorded with the strategy.",
            ),
            Patch(
                _VARIABLE,
                "__init__",
                "(self, initializer, shape=None, dtype=None, trainable=True, "
                "autocast=True, aggregation='none', synchronization='auto', "
                "name=None, layout=None, **kwargs)",
                "hooks.variable_init",
                "A variable that is made in a scope is recorded with the strategy; the "
                "policy of a `StateScope` replaces its initial value.",
            ),
            Patch(
                "keras.src.trainers.epoch_iterator.EpochIterator",
                "__init__",
                "(self, x, y=None, sample_weight=None, batch_size=None, "
                "steps_per_epoch=None, shuffle=False, class_weight=None, "
                "steps_per_execution=1)",
                "hooks.epochs",
                "`fit` takes distributed datasets, without a strategy too, and "
                "refuses batches that cannot be split.",
            ),
            Patch(
                _SAVING,
                "_load_model_from_fileobj",
                "(fileobj, custom_objects, compile, safe_mode)",
                "hooks.load_model",
                "Large files are read in pieces; variables get their values at once.",
            ),
            Patch(
                _SAVING,
                "_model_from_config",
                "(config_json, custom_objects, compile, safe_mode)",
                "optimizers.optimizer_classes.model_from_config",
                "A file of Keras on Torch names Torch's class of an optimizer.",
            ),
            Patch(
                "keras.src.saving.saving_api",
                "load_weights",
                "(model, filepath, skip_mismatch=False, **kwargs)",
                "hooks.load_weights",
                "Large files are read in pieces, and an error names a damaged one.",
            ),
            Patch(
                f"{_BACKEND}.core | {_BACKENDS_OPS}",
                "remat",
                "(f)",
                "backends.rematerialization.remat",
                "JAX finds the trace of a function again that a layer keeps, with the "
                "values that variables had when the model was built: they never train. "
                "On Torch the backward pass would call a layer with weights in shards, "
                "and a compiled layer call computes again what it does not keep. On "
                "TensorFlow it would find no variables that replicas read.",
            ),
        ),
    ),
    "custom loops": Group(
        "While replicas of a `run`, or of a custom loop that is traced, compute.",
        (
            Patch(
                _VARIABLE,
                "assign_add",
                "(self, value)",
                "hooks.assign_add",
                "Replicas in `run` may add to any variable. The added values are "
                "summed, not the assigned ones.",
            ),
            Patch(
                _VARIABLE,
                "assign_sub",
                "(self, value)",
                "hooks.assign_sub",
                "As `assign_add`.",
            ),
            Patch(
                _OPTIMIZER,
                "apply",
                _APPLY,
                "hooks.apply",
                "Replicas in `run` may call any optimizer. Gradients are summed first.",
            ),
            Patch(
                _LOSS_SCALE,
                "apply",
                _APPLY,
                "hooks.apply",
                "Overrides the method of `BaseOptimizer`.",
            ),
        ),
        is_temporary=True,
    ),
    "replicas": Group(
        "From a step that splits layer calls on, until the model's method ends; in "
        "`run`, while replicas compute.",
        (
            Patch(
                f"{_LOSSES}.Loss",
                "__call__",
                "(self, y_true, y_pred, sample_weight=None)",
                "hooks.loss_call",
                "Replicas compute the losses of outputs that they have; `run` notes "
                "means over the rows of a replica.",
            ),
            Patch(
                "keras.src.layers.normalization.batch_normalization.BatchNormalization",
                "_moments",
                "(self, inputs, mask)",
                "hooks.moments",
                "Replicas in `run` use statistics of the global batch.",
            ),
            Patch(
                "keras.src.models.functional.Functional",
                "_maybe_warn_inputs_struct_mismatch",
                "(self, inputs, raise_exception=False)",
                "hooks.input_structure_warning",
                "Replicas have the same structure of inputs: one of them warns.",
            ),
            Patch(
                "keras.src.utils.torch_utils.TorchModuleWrapper",
                "call",
                "(self, *args, training=None, **kwargs)",
                "backends.keras_on_torch.call_module",
                "The module has the parameters of one device; each replica calls a "
                "copy with its own ones.",
                backend="torch",
            ),
            Patch(
                "keras.src.losses.loss",
                "scale_loss_for_distribution",
                "(value)",
                "backends.keras_on_tensorflow.scale_loss",
                "Losses on a replica are of its rows already.",
                backend="tensorflow",
            ),
            Patch(
                "keras.src.losses.loss",
                "unscale_loss_for_distribution",
                "(value)",
                "backends.keras_on_tensorflow.scale_loss",
                "As `scale_loss_for_distribution`.",
                backend="tensorflow",
            ),
            Patch(
                f"{_TENSORFLOW}.optimizer.TFOptimizer",
                "__init__",
                "(self, *args, **kwargs)",
                "backends.keras_on_tensorflow.optimizer_init",
                "On a replica it would take the engine's `tf.distribute` strategy for "
                "that of its slots.",
                backend="tensorflow",
            ),
        ),
        is_temporary=True,
    ),
    "row parts": Group(
        "From a step that splits layer calls on, until the model's method ends.",
        (
            Patch(
                f"{_TORCH}.nn | {_TORCH}.ops.nn",
                "sparse_categorical_crossentropy",
                "(target, output, from_logits=False, axis=-1)",
                "backends.keras_on_torch.sparse_categorical_crossentropy",
                "It moves the axis of classes before those of tokens or pixels, which "
                "copies all logits: with 32,768 words it takes three times as long.",
                backend="torch",
            ),
            Patch(
                _LOSSES,
                "apply_mask",
                "(sample_weight, mask, dtype, reduction)",
                "hooks.apply_mask",
                "On replicas, the valid entries of all rows are counted.",
            ),
            Patch(
                _LOSSES,
                "reduce_values",
                "(values, sample_weight=None, reduction='sum_over_batch_size')",
                "hooks.reduce_values",
                "On replicas, the weights of all rows are added.",
            ),
            Patch(
                "keras.src.trainers.compile_utils.CompileMetrics",
                "update_state",
                "(self, y_true, y_pred, sample_weight=None)",
                "hooks.compiled_metrics",
                "Workers send the sums of all metrics at once.",
            ),
            Patch(
                "keras.src.trainers.compile_utils.MetricsList",
                "update_state",
                "(self, y_true, y_pred, sample_weight=None)",
                "hooks.metrics_update",
                "Replicas update metrics of users, too.",
            ),
            *(
                Patch(
                    f"keras.src.metrics.{name}",
                    "update_state",
                    f"(self, {arguments}, sample_weight=None)",
                    "hooks.metric_update",
                    "Replicas update metrics with outputs that they have.",
                )
                for name, arguments in (
                    ("reduction_metrics.Mean", "values"),
                    ("reduction_metrics.Sum", "values"),
                    ("reduction_metrics.MeanMetricWrapper", "y_true, y_pred"),
                    ("regression_metrics.RootMeanSquaredError", "y_true, y_pred"),
                    ("regression_metrics.R2Score", "y_true, y_pred"),
                    (
                        "confusion_metrics._ConfusionMatrixConditionCount",
                        "y_true, y_pred",
                    ),
                    ("confusion_metrics.Precision", "y_true, y_pred"),
                    ("confusion_metrics.Recall", "y_true, y_pred"),
                    ("confusion_metrics.SensitivitySpecificityBase", "y_true, y_pred"),
                    ("confusion_metrics.AUC", "y_true, y_pred"),
                    ("f_score_metrics.FBetaScore", "y_true, y_pred"),
                    ("iou_metrics._IoUBase", "y_true, y_pred"),
                    ("iou_metrics.BinaryIoU", "y_true, y_pred"),
                )
            ),
        ),
        is_temporary=True,
    ),
    "scope": Group(
        "While `strategy.scope()` or a method of a strategy's model is open.",
        (
            *(
                Patch(
                    "keras.src.models.model.Trainer",
                    f"make_{kind}_function",
                    "(self, force=False)",
                    "hooks.check_model_scope",
                    "A model that was made outside of the scope raises an error in it: "
                    "its batches would be padded, or a worker's own rows, and its "
                    "results wrong.",
                    backend="jax | tensorflow | torch",
                )
                for kind in ("train", "test", "predict")
            ),
            Patch(
                _TRAINER,
                "compile",
                "(self, optimizer='rmsprop', loss=None, loss_weights=None, "
                "metrics=None, weighted_metrics=None, run_eagerly=False, "
                "steps_per_execution=1, jit_compile='auto', auto_scale_loss=True)",
                "hooks.check_model_scope",
                "The same error: `fit` outside of the scope would train the model on "
                "one device without a word.",
            ),
            Patch(
                f"{_TORCH}.numpy | {_TORCH}.ops.numpy",
                "repeat",
                "(x, repeats, axis=None)",
                "backends.keras_on_torch.repeat",
                "It raises on the device `meta`, so a model with `UpSampling2D` would "
                "be built by a call on all rows of a batch, on each worker.",
                backend="torch",
            ),
            Patch(
                "keras.src.models.model.Model",
                "_post_quantize",
                "(self, mode, **kwargs)",
                "backends.keras_on_torch.post_quantize",
                "It registers values of variables, which have none in a plan.",
                backend="torch",
            ),
        ),
        is_temporary=True,
    ),
    "routes": Group(
        "From a step that splits layer calls on, until the model's method ends.",
        (
            Patch(
                _LAYER,
                "__call__",
                "(self, *args, **kwargs)",
                "models.layer_calls.routed_call",
                "The outermost layer call of a step is computed by all replicas, also "
                "of a layer that was made outside of the scope.",
            ),
        ),
        is_temporary=True,
    ),
    "input": Group(
        "From a strategy that places batches on, until a model's method ends.",
        (
            Patch(
                f"{_JAX}.trainer",
                "_distribute_data",
                "(data, layouts=None) | (data, layouts=None, is_super_batch=False)",
                "backends.keras_on_jax.distribute_data",
                "`train_on_batch` and the like place batches by it.",
                backend="jax",
            ),
            Patch(
                f"{_JAX}.trainer.JAXEpochIterator",
                "_get_iterator",
                "(self)",
                "backends.keras_on_jax.epoch_batches",
                "It uses the layouts of the first batch for all batches.",
                backend="jax",
            ),
            Patch(
                f"{_TENSORFLOW}.trainer.TFEpochIterator",
                "__init__",
                "(self, distribute_strategy=None, *args, **kwargs)",
                "models.input_adapters.tensorflow_epochs",
                "`_distributed_dataset` is iterated over in each epoch.",
                backend="tensorflow",
            ),
            Patch(
                f"{_TORCH}.trainer.TorchEpochIterator",
                "_get_iterator",
                "(self)",
                "models.input_adapters.torch_epoch_batches",
                "Batches are placed ahead of their use.",
                backend="torch",
            ),
        ),
        is_temporary=True,
    ),
    "jax workers": Group(
        "From a scope of several workers or of model parallelism on JAX on.",
        (
            Patch(
                f"{_JAX}.distribution_lib",
                "distribute_tensor",
                "(tensor, layout)",
                "backends.keras_on_jax.distribute_tensor",
                "`jax.device_put` compares the value in all processes, but only one "
                "may have it.",
                backend="jax",
            ),
        ),
    ),
    "jax convolutions": Group(
        "From the first step on a mesh of JAX's devices on.",
        tuple(
            Patch(
                f"{_JAX}.nn | {_JAX}.ops.nn",
                name,
                "(inputs, kernel, strides=1, padding='valid', data_format=None, "
                "dilation_rate=1)",
                f"backends.keras_on_jax.{around}",
                "XLA gathers the rows of grouped convolutions, and fails on sharded "
                "kernels.",
                backend="jax",
            )
            for name, around in (
                ("conv", "convolution"),
                ("depthwise_conv", "depthwise_convolution"),
            )
        ),
    ),
    "draws": Group(
        "While a replica computes, and on Torch while a step runs.",
        tuple(
            Patch(
                f"{_BACKEND}.random",
                name,
                signature,
                "random_draws.drawn",
                "A replica draws the random numbers of its rows.",
                backend="jax | tensorflow | torch",
            )
            for name, signature in _DRAWS
        ),
        is_temporary=True,
    ),
    "tensorflow replicas": Group(
        "From a scope of several replicas on TensorFlow on.",
        (
            Patch(
                f"{_TENSORFLOW}.optimizer.TFOptimizer",
                "_all_reduce_sum_gradients",
                "(self, grads_and_vars)",
                "backends.keras_on_tensorflow.sum_gradients",
                "In the default strategy of `tf.distribute` it registers a gradient "
                "function that holds the graph until the process ends.",
                backend="tensorflow",
            ),
        ),
    ),
    "torch dtensors": Group(
        "From a scope of model parallelism on Torch on.",
        (
            Patch(
                _BACKENDS,
                "convert_to_numpy",
                "(x)",
                "backends.keras_on_torch.to_numpy",
                "Saving calls it. It knows no DTensors, or gathers them, for which "
                "every process would have to save.",
                backend="torch",
            ),
            Patch(
                f"{_TORCH}.core | {_TORCH}.ops.core",
                "convert_to_numpy",
                "(x)",
                "backends.keras_on_torch.to_numpy",
                "The same function, for modules of the backend.",
                backend="torch",
            ),
            Patch(
                _LAYER,
                "_get_regularization_losses",
                "(self)",
                "backends.keras_on_torch.regularization_losses",
                "It computes with variables themselves, which are DTensors.",
                backend="torch",
            ),
        ),
    ),
    "parameter servers": Group(
        "From the scope of a parameter-server strategy, or in its workers and servers.",
        (
            Patch(
                _OPTIMIZER,
                "add_variable_from_reference",
                "(self, reference_variable, name=None, initializer='zeros')",
                "optimizers.applying.add_slot",
                "A slot is on the server of its variable.",
            ),
            Patch(
                "keras.src.optimizers.multi_optimizer.MultiOptimizer",
                "apply",
                _APPLY,
                "optimizers.applying.shared_apply",
                "A worker sends gradients instead of applying them.",
            ),
            Patch(
                _LOSS_SCALE,
                "stateless_apply",
                "(self, optimizer_variables, grads, trainable_variables)",
                "optimizers.applying.stateless_apply",
                "It would apply its inner optimizer in a branch of a condition.",
            ),
        ),
    ),
    "lookups": Group(
        "While a step of a parameter-server worker is traced or runs.",
        (
            Patch(
                f"{_BACKEND}.numpy | {_BACKEND}.ops.numpy",
                "take",
                "(x, indices, axis=None)",
                "variables.lookups.take",
                "`Embedding` and `ops.take` call it with the variable. Rows come from "
                "servers.",
            ),
        ),
        is_temporary=True,
    ),
    "torch servers": Group(
        "From the scope of a parameter-server strategy on Torch on.",
        (
            Patch(
                f"{_TORCH}.layer.TorchLayer",
                "_track_variables",
                "(self)",
                "variables.hosted_variables.track_variables",
                "`_torch_params` has the values of variables, which are on servers.",
                backend="torch",
            ),
            Patch(
                f"{_TORCH}.layer.TorchLayer",
                "_post_track_variable",
                "(self, variable)",
                "variables.hosted_variables.track_variable",
                "As `_track_variables`.",
                backend="torch",
            ),
        ),
    ),
    "positions": Group(
        "From the first `Resume` on.",
        (
            Patch(
                "keras.src.callbacks.callback_list.CallbackList",
                "__init__",
                "(self, callbacks=None, add_history=False, add_progbar=False, "
                "model=None, **params)",
                "models.fit_position.callback_list_init",
                "`Resume` begins before all callbacks and ends after them.",
            ),
            Patch(
                "keras.src.trainers.epoch_iterator.EpochIterator",
                "reset",
                "(self)",
                "models.fit_position.reset_epochs",
                "`fit` resets its iterator before it makes its callbacks: `Resume` "
                "finds it.",
            ),
            Patch(
                "keras.src.trainers.epoch_iterator.EpochIterator",
                "_enumerate_iterator",
                "(self)",
                "models.fit_position.epoch_steps",
                "`Resume` skips steps, and runs between steps.",
            ),
        ),
    ),
    "loading": Group(
        "While a model is made whose variables are loaded.",
        (
            Patch(
                f"{_TORCH}.layer.TorchLayer",
                "_post_build",
                "(self)",
                "variables.loaded_variables.track_variables",
                "It reads the values of variables that have none yet.",
                backend="torch",
            ),
        ),
        is_temporary=True,
    ),
    "streaming": Group(
        "While a model of a strategy is saved, or a model is loaded.",
        (
            Patch(
                f"{_SAVING}.H5IOStore",
                "__setitem__",
                "(self, key, value)",
                "saving.streaming.write_variable",
                "Keras makes one array of each variable, which may exceed the memory.",
            ),
            Patch(
                f"{_SAVING}.ShardedH5IOStore",
                "__setitem__",
                "(self, key, value)",
                "saving.streaming.write_sharded",
                "As `H5IOStore`.",
            ),
            Patch(
                f"{_SAVING}.H5IOStore",
                "__getitem__",
                "(self, key)",
                "saving.streaming.read_variable",
                "As `__setitem__`.",
            ),
            Patch(
                _SAVING,
                "_load_state",
                "(saveable, weights_store, assets_store, inner_path, "
                "skip_mismatch=False, visited_saveables=None, failed_saveables=None, "
                "error_msgs=None)",
                "saving.streaming.load_state",
                "It visits layers and optimizers: only arrays of streamed variables "
                "are read in pieces.",
            ),
            Patch(
                _SAVING,
                "is_memory_sufficient",
                "(model)",
                "saving.streaming.memory_suffices",
                "It makes Keras read entire files into memory, or copy them.",
            ),
            Patch(
                f"{_SAVING}.H5IOStore",
                "_get_h5_file",
                "(self, path_or_io, mode=None)",
                "saving.streaming.open_file",
                "It opens a file of an archive in memory.",
            ),
            Patch(
                f"{_SAVING}.H5IOStore",
                "close",
                "(self)",
                "saving.streaming.close_file",
                "As `_get_h5_file`.",
            ),
            Patch(
                _OPTIMIZER,
                "save_own_variables",
                "(self, store)",
                "saving.streaming.save_slots",
                "It materializes each slot, which may exceed the memory of a process.",
            ),
        ),
        is_temporary=True,
    ),
}
