"""Writes the tables of docs/keras-features.md: features of Keras, each with its test.

    python tests/pages/features.py            # write
    python tests/pages/features.py --check    # exit with 1 if the page differs

A case of `tests/exactness` is given by its name, another test by its file and name. All
compare histories, weights or predictions with Keras alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "keras-features.md"
_BLOCK = re.compile(r"(<!-- features: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_OWN = "training/test_keras_features.py::test"
_MODELS = "test_model_integration.py::test"

#: By group a line for each feature: its name, as a user would look for it; the cases or
#: tests that compare it, separated by spaces; what is different, or where it does not
#: work.
_TEXTS = {
    "input": f"""
NumPy arrays, tensors of the backend | arrays tensors
`pandas.DataFrame`, `Series` | pandas pandas_frames
`tf.data.Dataset` | tf_data
`torch.utils.data.DataLoader` | data_loader
`keras.utils.PyDataset`, with workers | py_dataset py_dataset_2_workers
generators, endless ones with `steps_per_epoch` | generator generator_endless
dicts, tuples and nested inputs | dict_inputs tuple_inputs nested_inputs
last batches that do not divide, batches of one row | size_25 size_7 size_1 batch_1
`image_dataset_from_directory` | {_OWN}_images_of_a_folder
`timeseries_dataset_from_array` | {_OWN}_a_time_series
text by `TextVectorization` | {_OWN}_text | strings in the model: TensorFlow
`shuffle=True` | shuffle \
input/test_shuffled_epochs.py::test_epochs_read_the_rows_of_keras
`class_weight`, `sample_weight` | class_weight sample_weight
`validation_split`, `validation_data` | validation_split validation_data \
validation_weights
""",
    "losses and metrics": """
every reduction, smoothing, focal, Huber, cosine | loss_sum_over_batch_size loss_sum \
loss_mean_with_sample_weight loss_categorical_smoothed loss_focal loss_huber loss_cosine
losses of your own, per row and scalar | loss_function_per_sample loss_function_scalar
losses that compare rows (contrastive) | loss_contrastive | all rows on one device
several outputs, losses and weights of losses | loss_weights metrics_per_output
`add_loss`, regularizers | add_loss_mean add_loss_sum regularizers activity_regularizer
accuracy, AUC, precision, recall, F1, IoU, R2 | accuracy auc precision_recall f1_score \
mean_iou r2_rmse
metrics of your own, a maximum as state | metric_maximum metric_function
weighted metrics | weighted_metrics
""",
    "models and layers": f"""
Sequential, functional, subclassed | sequential_unbuilt shared_layer subclassed_tf_data
batch normalization over all replicas | conv_bn masked_bn dense_bn_weights
masks, LSTM, GRU | lstm_mask gru_mask_in_loss
attention, transformers, tied embeddings | transformer tied_embeddings
layers with state of their own | counting_layer stateful_layers
freezing and unfreezing | frozen {_MODELS}_freezing_and_unfreezing_between_fits
custom `train_step`, `predict_step`, two players | custom_step custom_predict_step \
custom_step_two_players
LoRA, before and after `fit` | {_OWN}_lora
int8, int4 | int8 {_OWN}_predictions_of_integer_weights
gradient checkpoints (`keras.remat`) | test_rematerialization.py::test_remat_in_a_layer
dropout, noise, augmentation \
| random_numbers/test_rows.py::test_training_is_that_of_one_device \
| on Torch beside `OneDeviceStrategy`
models of keras-hub | field/test_models.py::test_model_of_keras_hub
models of `keras.applications` | exactness/test_applications.py::test_application
""",
    "optimizers": """
SGD, Adam, AdamW, RMSprop | sgd_plain adam adamw rmsprop
weight decay, clipping by value, norm and global norm | weight_decay clipvalue \
clipnorm global_clipnorm
moving averages (`use_ema`) | ema ema_at_end
`gradient_accumulation_steps` | gradient_accumulation
schedules of the learning rate | learning_rate_schedule
`mixed_float16`, `mixed_bfloat16`, loss scale | mixed_float16 mixed_bfloat16 \
loss_scale | rounds more: 1e-3 of weights
float8 | test_float8.py::test_fit_overwrites_as_on_one_device
""",
    "fit and its siblings": """
`train_on_batch`, `test_on_batch`, `predict_on_batch` | on_batch on_batch_bn
`steps_per_execution` | steps_per_execution steps_per_execution_bn_weights \
| JAX, TensorFlow; Keras refuses it on Torch
`jit_compile`, `run_eagerly` | jit_compile no_jit_compile run_eagerly
`initial_epoch`, several `fit`s, a second `compile` | initial_epoch fit_options \
compile_twice
two `fit`s in two threads | test_simultaneous_fits.py\
::test_two_first_fits_at_once_are_those_one_after_the_other
""",
    "callbacks": f"""
`EarlyStopping`, `ReduceLROnPlateau`, `LearningRateScheduler` | {_OWN}_callback
`ModelCheckpoint`, the best one too | {_OWN}_callback \
{_MODELS}_callbacks_do_what_they_do_on_one_device
`CSVLogger`, `TerminateOnNaN`, `SwapEMAWeights` | {_OWN}_callback
`TensorBoard` | {_MODELS}_tensorboard_writes_its_events
`BackupAndRestore` | {_MODELS}_an_interrupted_run_resumes_from_its_backup
`OrbaxCheckpoint` | checkpoints/test_orbax_callback.py::test_training_goes_on | JAX
callbacks that evaluate, predict, save \
| {_MODELS}_a_callback_evaluates_predicts_saves_and_changes_the_rate
""",
    "files and copies": f"""
`.keras`, with and without a strategy \
| {_MODELS}_a_saved_model_opens_with_and_without_a_strategy
`.keras` on another backend | {_MODELS}_a_saved_model_opens_on_another_backend
`pickle`, `copy.deepcopy`, then training | {_OWN}_a_copy_trains_on
`to_json`, files of weights | {_OWN}_a_copy_trains_on
`clone_model` | {_MODELS}_a_clone_belongs_to_the_scope_that_it_is_made_in
`export` as SavedModel | {_OWN}_a_saved_model_predicts | JAX, TensorFlow
scikit-learn's `cross_val_score` | {_OWN}_scikit_learn
""",
}
#: By group the name, the tests and the note of each feature.
FEATURES = {
    group: [f"{line} | ".split(" | ")[:3] for line in text.strip().splitlines()]
    for group, text in _TEXTS.items()
}


def table(group: str) -> str:
    """The Markdown of one group."""
    lines = ["| feature | note |", "|---|---|"]
    lines += [f"| {name} | {note} |" for name, _, note in FEATURES[group]]
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """The page with its tables."""
    return _BLOCK.sub(lambda f: f"{f[1]}\n{table(f[2])}\n\n{f[3]}", text)


def main() -> None:
    text = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(rewritten(text))
    elif rewritten(text) != text:
        sys.exit(f"Run `python tests/pages/features.py`: {PAGE} differs.")


if __name__ == "__main__":
    main()
