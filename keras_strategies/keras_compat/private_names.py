"""All private names of Keras that are used without being replaced.

`tests/keras_compat/test_manifest.py` finds names that the installed Keras no longer
has, and names that `keras_compat` uses without a row here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Private:
    """Attributes of a class or module of Keras.

    Args:
        owner: str, its full name; several versions are separated by `" | "`.
        names: tuple of str.
        why: str, their use.
        backend: str, the backend that has them; empty for all.
        version: str, the version of Keras that has them, such as "3.16"; empty for all.
    """

    owner: str
    names: tuple[str, ...]
    why: str
    backend: str = ""
    version: str = ""


_COMMON = "keras.src.backend.common"
_ADAPTERS = "keras.src.trainers.data_adapters"
_SAVING = "keras.src.saving.saving_lib"
_OPTIMIZER = "keras.src.optimizers.base_optimizer"
_TRAINER = "keras.src.trainers.trainer"

PRIVATE = (
    Private(
        f"{_COMMON}.global_state",
        ("GLOBAL_STATE_TRACKER", "get_global_attribute", "set_global_attribute"),
        "State of a thread: scopes, devices, variables that wait for their values.",
    ),
    Private(
        "keras.metrics.R2Score",
        ("_built",),
        "Replicas update metrics that have their variables.",
    ),
    Private(
        f"{_COMMON}.stateless_scope", ("get_stateless_scope",), "The innermost scope."
    ),
    Private(
        f"{_COMMON}.masking",
        ("get_keras_mask", "set_keras_mask"),
        "Masks travel with the rows of a replica.",
    ),
    Private(
        f"{_COMMON}.variables",
        ("get_autocast_scope",),
        "The dtype that a variable is read in.",
    ),
    Private(
        f"{_COMMON}.variables.Variable",
        (
            "_autocast",
            "_deferred_initialize",
            "_direct_assign",
            "_dtype",
            "_initialize",
            "_initialize_with_initializer",
            "_initializer",
            "_maybe_autocast",
            "_path",
            "_shape",
            "_value",
        ),
        "Placement of values, and hosted variables, which have none.",
    ),
    Private(
        "keras.src.backend.jax.core.Variable | keras.src.backend.Variable",
        ("_initialize_layout", "_layout"),
        "Layouts.",
        "jax",
    ),
    Private(
        "keras.src.backend.jax.trainer.JAXTrainer | "
        "keras.src.backend.jax.trainer.Trainer",
        (
            "_get_jax_state",
            "_jax_state",
            "_jax_state_synced",
            "_purge_model_variables",
            "jax_state_sync",
        ),
        "The arrays of variables while a loop is under way.",
        "jax",
    ),
    Private(
        "keras.src.backend.tensorflow.core.Variable | keras.src.backend.Variable",
        (
            "_copy_trackable_to_cpu",
            "_export_to_saved_model_graph",
            "_restore_from_tensors",
            "_serialize_to_tensors",
            "_shared_name",
        ),
        "Hosted variables in checkpoints and SavedModels.",
        "tensorflow",
    ),
    Private(
        "keras.src.backend.tensorflow.optimizer",
        ("filter_empty_gradients",),
        "Errors and warnings of an optimizer.",
        "tensorflow",
    ),
    Private(
        "keras.src.backend.tensorflow.trainer.TensorFlowTrainer | "
        "keras.src.backend.tensorflow.trainer.Trainer",
        ("_maybe_symbolic_build",),
        "The batch that a model is built from; on JAX, Keras 3.16 has it too.",
        "tensorflow",
    ),
    Private(
        "keras.src.backend.tensorflow.trainer.TFEpochIterator",
        ("_distributed_dataset",),
        "Placement of batches.",
        "tensorflow",
    ),
    Private(
        "keras.src.backend.torch.layer.TorchLayer",
        ("_torch_params", "_track_variables"),
        "Parameters of hosted variables, and of those that shards replace.",
        "torch",
    ),
    Private(
        "keras.src.backend",
        ("compute_output_spec",),
        "Traces of updates; metrics and losses that are built from symbolic outputs.",
    ),
    Private(
        "keras.src.distribution.distribution_lib.DeviceMesh",
        ("_backend_mesh", "_devices", "_shape"),
        "The mesh of elastic workers is put on other devices.",
        "jax",
    ),
    Private(
        "keras.src.distribution.distribution_lib.TensorLayout",
        ("_backend_layout",),
        "As the mesh.",
        "jax",
    ),
    Private(
        "keras.src.distribution.distribution_lib",
        ("Distribution",),
        "The base of our distributions.",
    ),
    Private(
        "keras.src.layers.layer.Layer",
        (
            "_clear_losses",
            "_flatten_layers",
            "_layers",
            "_remat_mode",
            "_tracker",
            "_trainable_variables",
            "_untrack_variable",
        ),
        "The sublayers of a model, its switches, its variables, and the losses of its "
        "last call.",
    ),
    Private(
        "keras.src.ops.operation.Operation",
        ("_inbound_nodes",),
        "The inputs of the operations of a functional model.",
    ),
    Private(
        "keras.src.models.sequential.Sequential",
        ("_functional",),
        "The functional model that a sequential model runs.",
    ),
    Private(
        "keras.src.activations.activations",
        ("_keras_logits",),
        "The logits of probabilities, for losses.",
        backend="tensorflow",
    ),
    Private(
        "keras.src.layers.MultiHeadAttention",
        ("_attention_axes",),
        "The axes that attention mixes.",
    ),
    Private(f"{_OPTIMIZER}", ("BaseOptimizer",), "Optimizers of every backend."),
    Private(
        f"{_OPTIMIZER}.BaseOptimizer",
        (
            "_accumulated_gradients",
            "_apply_weight_decay",
            "_backend_apply_gradients",
            "_backend_update_step",
            "_clip_gradients",
            "_get_variable_index",
            "_iterations",
            "_learning_rate",
            "_model_variables_moving_average",
            "_trainable_variables",
            "_trainable_variables_indices",
            "_use_weight_decay",
            "_var_key",
        ),
        "Updates on parameter servers.",
    ),
    Private(
        "keras.src.backend.tensorflow.optimizer.TFOptimizer",
        ("_apply_weight_decay", "_clip_gradients"),
        "Updates of shards on their devices.",
        "tensorflow",
    ),
    Private(
        "keras.src.initializers.random_initializers.RandomInitializer",
        ("_init_seed",),
        "Initial values that are made in pieces.",
    ),
    Private(
        "keras.src.random.seed_generator",
        ("draw_seed", "global_seed_generator"),
        "Draws of rows have the seeds of Keras; those without one begin outside of "
        "proofs.",
    ),
    Private(
        "keras.src.backend | keras.src.backend.ops",
        ("random_seed_dtype",),
        "Seeds that stand for those of Keras in proofs.",
    ),
    Private(
        "keras.src.trainers.compile_utils.CompileMetrics",
        ("_user_metrics", "_user_weighted_metrics"),
        "Whether only code of Keras's runs in the steps of a model.",
    ),
    Private(
        "keras.src.metrics.reduction_metrics.MeanMetricWrapper",
        ("_fn",),
        "Whether only code of Keras's runs in the steps of a model.",
    ),
    Private(
        "keras.src.layers.layer.Layer",
        ("_seed_generators",),
        "Whether a layer draws random numbers.",
    ),
    Private(
        "keras.src.saving.keras_saveable",
        ("KerasSaveable",),
        "Objects that are sent to workers.",
    ),
    Private(
        "keras.src.utils.tracking",
        ("Tracker",),
        "Containers that are sent to workers.",
    ),
    Private(
        "keras.src.utils.backend_utils",
        ("DynamicBackend",),
        "Preprocessing layers that are sent to workers.",
    ),
    Private(_SAVING, ("safe_get_h5_dataset",), "Arrays of files, in pieces."),
    Private(
        "keras.src.utils.io_utils",
        ("ask_to_proceed_with_overwrite",),
        "`save(overwrite=False)` names the path of the user.",
    ),
    Private(
        f"{_SAVING}.H5IOStore",
        (
            "_create_h5_group",
            "_h5_entry_group",
            "_h5_entry_initialized",
            "_h5_entry_path",
        ),
        "Arrays of files, in pieces.",
    ),
    Private(
        f"{_TRAINER}.BaseTrainer | {_TRAINER}.Trainer",
        (
            "_compile_loss",
            "_compile_metrics",
            "_compute_loss",
            "_resolve_auto_jit_compile",
            "_symbolic_build",
        ),
        "Models that are built and trained by parts of `fit`.",
    ),
    Private(
        "keras.src.models.model",
        ("Trainer",),
        "Training of models, and of layers that have it as a base.",
    ),
    Private(
        "keras.src.callbacks.backup_and_restore",
        ("_initial_epoch",),
        "The epoch that a backup was made in.",
    ),
    Private(
        "keras.src.trainers.compile_utils.CompileLoss",
        ("_user_loss",),
        "The losses that the user gave.",
    ),
    Private(
        "keras.src.models.functional",
        ("Functional",),
        "Models with known outputs.",
    ),
    Private(
        "keras.src.trainers.epoch_iterator", ("EpochIterator",), "Epochs of batches."
    ),
    Private(
        "keras.src.trainers.epoch_iterator.EpochIterator",
        (
            "_current_iterator",
            "_epoch_iterator",
            "_get_iterator",
            "_num_batches",
            "_steps_seen",
        ),
        "Position in the input.",
    ),
    Private(
        "keras.src.backend.tensorflow.trainer.TFEpochIterator",
        ("_distribute_strategy",),
        "An epoch iterator that is recreated.",
        "tensorflow",
    ),
    Private(
        "keras.src.callbacks.model_checkpoint.ModelCheckpoint",
        ("_batches_seen_since_last_saving", "_last_batch_seen"),
        "State of a callback.",
    ),
    Private(
        "keras.src.callbacks.swap_ema_weights.SwapEMAWeights",
        ("_ema_weights_in_model",),
        "State of a callback.",
    ),
    Private(
        "keras.src.callbacks.tensorboard.TensorBoard",
        ("_global_test_batch", "_global_train_batch"),
        "State of a callback.",
    ),
    Private(
        f"{_ADAPTERS}.array_data_adapter", ("ArrayDataAdapter",), "Arrays of `fit`."
    ),
    Private(
        f"{_ADAPTERS}.array_data_adapter.ArrayDataAdapter",
        ("_get_iterator", "_inputs", "_num_samples", "_shuffle"),
        "The rows of arrays, shuffled in another order.",
    ),
    Private(
        f"{_ADAPTERS}.torch_data_loader_adapter.TorchDataLoaderAdapter",
        ("_dataloader",),
        "The input of `fit`.",
    ),
    Private(
        f"{_ADAPTERS}.array_slicing",
        ("convert_to_sliceable",),
        "`validation_split` of `fit`, and rows of arrays.",
    ),
    Private(
        f"{_ADAPTERS}.data_adapter_utils",
        ("NUM_BATCHES_FOR_TENSOR_SPEC", "class_weight_to_sample_weights"),
        "Weights of samples.",
    ),
    Private(f"{_ADAPTERS}.data_adapter", ("DataAdapter",), "Input of `fit`."),
    Private(
        f"{_ADAPTERS}.generator_data_adapter",
        ("GeneratorDataAdapter",),
        "Input of `fit`.",
    ),
    Private(
        f"{_ADAPTERS}.generator_data_adapter.GeneratorDataAdapter",
        ("_output_signature",),
        "Input of `fit`.",
    ),
    Private(
        f"{_ADAPTERS}.py_dataset_adapter",
        ("PyDatasetAdapter",),
        "Passes over a `PyDataset`.",
    ),
    Private(
        f"{_ADAPTERS}.py_dataset_adapter.PyDatasetAdapter",
        ("_get_iterator", "_standardize_batch"),
        "Own rows of the batches of a `RowDataset`.",
    ),
    Private(
        f"{_ADAPTERS}.tf_dataset_adapter", ("TFDatasetAdapter",), "Shapes of batches."
    ),
    Private(
        f"{_ADAPTERS}.tf_dataset_adapter.TFDatasetAdapter",
        ("_dataset",),
        "Shapes of batches.",
    ),
)
