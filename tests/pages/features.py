"""Writes the tables of docs/keras-features.md: features of Keras, each with its test.

    python tests/pages/features.py            # write
    python tests/pages/features.py --check    # exit with 1 if the page differs

A case of `tests/exactness` is given by its name, another test by its file and name. All
compare histories, weights or predictions with Keras alone.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "keras-features.md"
_BLOCK = re.compile(r"(<!-- features: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_OWN = "training/test_keras_features.py::"
_MODELS = "test_model_integration.py::"


@dataclass(frozen=True)
class Feature:
    """A feature and the tests that compare it.

    Args:
        name: str, as a user would look for it.
        tests: str, cases or tests, separated by spaces.
        note: str, what is different, or where it does not work.
    """

    name: str
    tests: str
    note: str = ""


FEATURES: dict[str, tuple[Feature, ...]] = {
    "input": (
        Feature("NumPy arrays, tensors of the backend", "arrays tensors"),
        Feature("`pandas.DataFrame`, `Series`", "pandas pandas_frames"),
        Feature("`tf.data.Dataset`", "tf_data"),
        Feature("`torch.utils.data.DataLoader`", "data_loader"),
        Feature(
            "`keras.utils.PyDataset`, with workers", "py_dataset py_dataset_2_workers"
        ),
        Feature(
            "generators, endless ones with `steps_per_epoch`",
            "generator generator_endless",
        ),
        Feature(
            "dicts, tuples and nested inputs", "dict_inputs tuple_inputs nested_inputs"
        ),
        Feature(
            "last batches that do not divide, batches of one row",
            "size_25 size_7 size_1 batch_1",
        ),
        Feature("`image_dataset_from_directory`", f"{_OWN}test_images_of_a_folder"),
        Feature("`timeseries_dataset_from_array`", f"{_OWN}test_a_time_series"),
        Feature(
            "text by `TextVectorization`",
            f"{_OWN}test_text",
            "strings in the model: TensorFlow",
        ),
        Feature(
            "`shuffle=True`",
            "shuffle input/test_shuffled_epochs.py::test_epochs_read_the_rows_of_keras",
        ),
        Feature("`class_weight`, `sample_weight`", "class_weight sample_weight"),
        Feature(
            "`validation_split`, `validation_data`",
            "validation_split validation_data validation_weights",
        ),
    ),
    "losses and metrics": (
        Feature(
            "every reduction, smoothing, focal, Huber, cosine",
            "loss_sum_over_batch_size loss_sum loss_mean_with_sample_weight "
            "loss_categorical_smoothed loss_focal loss_huber loss_cosine",
        ),
        Feature(
            "losses of your own, per row and scalar",
            "loss_function_per_sample loss_function_scalar",
        ),
        Feature(
            "losses that compare rows (contrastive)",
            "loss_contrastive",
            "all rows on one device",
        ),
        Feature(
            "several outputs, losses and weights of losses",
            "loss_weights metrics_per_output",
        ),
        Feature(
            "`add_loss`, regularizers",
            "add_loss_mean add_loss_sum regularizers activity_regularizer",
        ),
        Feature(
            "accuracy, AUC, precision, recall, F1, IoU, R2",
            "accuracy auc precision_recall f1_score mean_iou r2_rmse",
        ),
        Feature(
            "metrics of your own, a maximum as state", "metric_maximum metric_function"
        ),
        Feature("weighted metrics", "weighted_metrics"),
    ),
    "models and layers": (
        Feature(
            "Sequential, functional, subclassed",
            "sequential_unbuilt shared_layer subclassed_tf_data",
        ),
        Feature(
            "batch normalization over all replicas",
            "conv_bn masked_bn dense_bn_weights",
        ),
        Feature("masks, LSTM, GRU", "lstm_mask gru_mask_in_loss"),
        Feature(
            "attention, transformers, tied embeddings", "transformer tied_embeddings"
        ),
        Feature("layers with state of their own", "counting_layer stateful_layers"),
        Feature(
            "freezing and unfreezing",
            f"frozen {_MODELS}test_freezing_and_unfreezing_between_fits",
        ),
        Feature(
            "custom `train_step`, `predict_step`, two players",
            "custom_step custom_predict_step custom_step_two_players",
        ),
        Feature("LoRA, before and after `fit`", f"{_OWN}test_lora"),
        Feature("int8, int4", f"int8 {_OWN}test_predictions_of_integer_weights"),
        Feature(
            "gradient checkpoints (`keras.remat`)",
            "test_rematerialization.py::test_remat_in_a_layer",
        ),
        Feature(
            "dropout, noise, augmentation",
            "random_numbers/test_rows.py::test_training_is_that_of_one_device",
            "on Torch beside `OneDeviceStrategy`",
        ),
        Feature("models of keras-hub", "field/test_models.py::test_model_of_keras_hub"),
        Feature(
            "models of `keras.applications`",
            "exactness/test_applications.py::test_application",
        ),
    ),
    "optimizers": (
        Feature("SGD, Adam, AdamW, RMSprop", "sgd_plain adam adamw rmsprop"),
        Feature(
            "weight decay, clipping by value, norm and global norm",
            "weight_decay clipvalue clipnorm global_clipnorm",
        ),
        Feature("moving averages (`use_ema`)", "ema ema_at_end"),
        Feature("`gradient_accumulation_steps`", "gradient_accumulation"),
        Feature("schedules of the learning rate", "learning_rate_schedule"),
        Feature(
            "`mixed_float16`, `mixed_bfloat16`, loss scale",
            "mixed_float16 mixed_bfloat16 loss_scale",
            "rounds more: 1e-3 of weights",
        ),
        Feature("float8", "test_float8.py::test_fit_overwrites_as_on_one_device"),
    ),
    "fit and its siblings": (
        Feature(
            "`train_on_batch`, `test_on_batch`, `predict_on_batch`",
            "on_batch on_batch_bn",
        ),
        Feature(
            "`steps_per_execution`",
            "steps_per_execution steps_per_execution_bn_weights",
            "JAX, TensorFlow; Keras refuses it on Torch",
        ),
        Feature(
            "`jit_compile`, `run_eagerly`", "jit_compile no_jit_compile run_eagerly"
        ),
        Feature(
            "`initial_epoch`, several `fit`s, a second `compile`",
            "initial_epoch fit_options compile_twice",
        ),
        Feature(
            "two `fit`s in two threads",
            "test_simultaneous_fits.py::test_two_first_fits_at_once_are_those_one_after_the_other",
        ),
    ),
    "callbacks": (
        Feature(
            "`EarlyStopping`, `ReduceLROnPlateau`, `LearningRateScheduler`",
            f"{_OWN}test_callback",
        ),
        Feature(
            "`ModelCheckpoint`, the best one too",
            f"{_OWN}test_callback "
            f"{_MODELS}test_callbacks_do_what_they_do_on_one_device",
        ),
        Feature(
            "`CSVLogger`, `TerminateOnNaN`, `SwapEMAWeights`", f"{_OWN}test_callback"
        ),
        Feature("`TensorBoard`", f"{_MODELS}test_tensorboard_writes_its_events"),
        Feature(
            "`BackupAndRestore`",
            f"{_MODELS}test_an_interrupted_run_resumes_from_its_backup",
        ),
        Feature(
            "`OrbaxCheckpoint`",
            "checkpoints/test_orbax_callback.py::test_training_goes_on",
            "JAX",
        ),
        Feature(
            "callbacks that evaluate, predict, save",
            f"{_MODELS}test_a_callback_evaluates_predicts_saves_and_changes_the_rate",
        ),
    ),
    "files and copies": (
        Feature(
            "`.keras`, with and without a strategy",
            f"{_MODELS}test_a_saved_model_opens_with_and_without_a_strategy",
        ),
        Feature(
            "`.keras` on another backend",
            f"{_MODELS}test_a_saved_model_opens_on_another_backend",
        ),
        Feature(
            "`pickle`, `copy.deepcopy`, then training", f"{_OWN}test_a_copy_trains_on"
        ),
        Feature("`to_json`, files of weights", f"{_OWN}test_a_copy_trains_on"),
        Feature(
            "`clone_model`",
            f"{_MODELS}test_a_clone_belongs_to_the_scope_that_it_is_made_in",
        ),
        Feature(
            "`export` as SavedModel",
            f"{_OWN}test_a_saved_model_predicts",
            "JAX, TensorFlow",
        ),
        Feature("scikit-learn's `cross_val_score`", f"{_OWN}test_scikit_learn"),
    ),
}


def table(group: str) -> str:
    """The Markdown of one group."""
    lines = ["| feature | note |", "|---|---|"]
    lines += [f"| {each.name} | {each.note} |" for each in FEATURES[group]]
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
