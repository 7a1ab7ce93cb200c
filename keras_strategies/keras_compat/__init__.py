"""All that this package uses of Keras beyond its public interface.

Tested with Keras 3.15 and 3.16. Each function says which symbol it relies on;
`tests/test_keras_compat.py` fails when one of them moves.

Keras is hooked in these places, all of them installed by the first strategy that
needs them and none by an import:

- `Trainer.__init__`, `Variable.__init__`: models and variables remember the
  strategy that they were made under;
- `fit` and its siblings, `compile`: run in that strategy's scope;
- `make_train_function` and its siblings: the strategy wraps the step;
- `Layer.__call__`: a thread can route the outermost call of a step;
- `BatchNormalization._moments`: statistics over the global batch;
- `EpochIterator.__init__`, `Trainer._symbolic_build`: input that cannot be split is
  refused at once;
- `optimizer.apply`, `LossScaleOptimizer.stateless_apply`, `variable.assign` and its
  siblings: replicas in `run`, workers of parameter servers;
- `Variable.__repr__`: says where the variable is;
- `Model.save`, `save_weights` and `export`: only the chief of several workers writes.
"""

from __future__ import annotations

from keras_strategies.keras_compat.authors import is_of_keras
from keras_strategies.keras_compat.hooks import (
    ModelHooks,
    install,
)
from keras_strategies.keras_compat.hosted import (
    RemoteValue,
    VariableHost,
    host_made_variable,
    host_of,
    host_variable,
    is_streamed,
    materialized,
    materialized_model,
    mix_in,
)
from keras_strategies.keras_compat.input import (
    BatchPlacer,
    DatasetPlacer,
    batches_adapter,
    batches_placed_by,
    hook_tensorflow_input,
    hook_torch_input,
    is_adapter,
    py_dataset_batches,
)
from keras_strategies.keras_compat.jax import (
    hook_jax_input,
    hook_jax_placement,
    layout_of,
    move_variable,
    record_jax_state,
    restore_jax_state,
    set_layout,
    sync_jax_state,
)
from keras_strategies.keras_compat.layers import (
    clear_losses,
    compute_dtypes,
    get_mask,
    layer_calls_through,
    layer_settings,
    set_mask,
    trained_variables,
    wraps_torch_modules,
)
from keras_strategies.keras_compat.models import (
    all_variables,
    build_optimizer,
    creates_metrics,
    element_spec,
    initial_epoch,
    is_built,
    is_unbuilt,
    seed_states,
    set_initial_epoch,
    set_strategy,
    skip_steps,
    strategy_of,
    symbolic_build,
)
from keras_strategies.keras_compat.parameter_server import (
    OpenShape,
    applying_through,
    clip_gradients,
    hook_lookups,
    hook_slots,
    hook_torch_layers,
    is_optimizer,
    lookups_through,
    make_variable,
    optimizer_kind,
    plain_optimizer,
    set_variable_shape,
    set_weight_decay,
    slot_reference,
    stop_clipping,
    values_scope,
    variable_maker,
    weight_decay_applies,
)
from keras_strategies.keras_compat.patching import (
    is_installed,
    replace,
    uninstall,
)
from keras_strategies.keras_compat.sending import (
    container_state,
    fill_container,
    object_state,
    rebuilt,
    renew_identities,
)
from keras_strategies.keras_compat.state import (
    build_optimizer_without_values,
    current_stateless_scope,
    deferred_variables,
    forgetting_deferred_variables,
    has_deferred_variables,
    initialize_deferred_variables,
    outside_stateless_scopes,
    thread_state,
    with_thread_state,
)
from keras_strategies.keras_compat.streaming import (
    StoredRows,
    hook_saving,
)
from keras_strategies.keras_compat.tensorflow import (
    holds_tf_variables,
    hook_tensorflow,
    is_in_optimizer,
)
from keras_strategies.keras_compat.torch import (
    distribution_class,
    hook_torch_dtensors,
)
from keras_strategies.keras_compat.training import (
    callback_list,
    check_compiled,
    epoch_iterator,
    logs_in_order,
    metrics_or_logs,
    resumed_epoch,
    sample_weights,
    should_evaluate,
    split_for_validation,
)
from keras_strategies.keras_compat.updates import (
    optimizers_of,
    update_without_conditions,
    used_by_update,
)
from keras_strategies.keras_compat.variables import (
    IdSet,
    autocast_dtype,
    guard_value,
    raw_value,
    seed_offset,
    set_raw_value,
)

__all__ = [
    "BatchPlacer",
    "DatasetPlacer",
    "IdSet",
    "ModelHooks",
    "OpenShape",
    "RemoteValue",
    "StoredRows",
    "VariableHost",
    "all_variables",
    "applying_through",
    "autocast_dtype",
    "batches_adapter",
    "batches_placed_by",
    "build_optimizer",
    "build_optimizer_without_values",
    "callback_list",
    "check_compiled",
    "clear_losses",
    "clip_gradients",
    "compute_dtypes",
    "container_state",
    "creates_metrics",
    "current_stateless_scope",
    "deferred_variables",
    "distribution_class",
    "element_spec",
    "epoch_iterator",
    "fill_container",
    "forgetting_deferred_variables",
    "get_mask",
    "guard_value",
    "has_deferred_variables",
    "holds_tf_variables",
    "hook_jax_input",
    "hook_jax_placement",
    "hook_lookups",
    "hook_saving",
    "hook_slots",
    "hook_tensorflow",
    "hook_tensorflow_input",
    "hook_torch_dtensors",
    "hook_torch_input",
    "hook_torch_layers",
    "host_made_variable",
    "host_of",
    "host_variable",
    "initial_epoch",
    "initialize_deferred_variables",
    "install",
    "is_adapter",
    "is_built",
    "is_in_optimizer",
    "is_installed",
    "is_of_keras",
    "is_optimizer",
    "is_streamed",
    "is_unbuilt",
    "layer_calls_through",
    "layer_settings",
    "layout_of",
    "logs_in_order",
    "lookups_through",
    "make_variable",
    "materialized",
    "materialized_model",
    "metrics_or_logs",
    "mix_in",
    "move_variable",
    "object_state",
    "optimizer_kind",
    "optimizers_of",
    "outside_stateless_scopes",
    "plain_optimizer",
    "py_dataset_batches",
    "raw_value",
    "rebuilt",
    "record_jax_state",
    "renew_identities",
    "replace",
    "restore_jax_state",
    "resumed_epoch",
    "sample_weights",
    "seed_offset",
    "seed_states",
    "set_initial_epoch",
    "set_layout",
    "set_mask",
    "set_raw_value",
    "set_strategy",
    "set_variable_shape",
    "set_weight_decay",
    "should_evaluate",
    "skip_steps",
    "slot_reference",
    "split_for_validation",
    "stop_clipping",
    "strategy_of",
    "symbolic_build",
    "sync_jax_state",
    "thread_state",
    "trained_variables",
    "uninstall",
    "update_without_conditions",
    "used_by_update",
    "values_scope",
    "variable_maker",
    "weight_decay_applies",
    "with_thread_state",
    "wraps_torch_modules",
]
