"""Scripts as cases of `ks.verify_processes`: is the bug found, and named?"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from typing import Any

from museum.common import devices

#: What verification says of each script: the cause; "found" where the difference is
#: found and the cause is a guess; "equal" where the installed release has mended the
#: bug; "no devices" where one device has it, too, so that nothing can be compared.
VERDICTS = {
    "accelerate_last_window": "no devices",
    "accelerate_own_sampler": "data_depends_on_replicas",
    "accelerate_repeated_rows": "data_depends_on_replicas",
    "accelerate_scheduler": "learning_rate_scaled",
    "ddp_batch_norm": "one_replica_only",
    "ddp_contrastive_loss": "scaled_by_replicas",
    "ddp_loss_times_processes": "scaled_by_replicas",
    "ddp_metric_in_buffers": "found",
    "ddp_module_bypassed": "one_replica_only",
    "ddp_sum_of_losses": "scaled_by_replicas",
    "ddp_uneven_rows": "mean_of_means",
    "ddp_unused_module": "one_replica_only",
    "ddp_weighted_rows": "mean_of_means",
    "flax_batch_statistics": "one_replica_only",
    "flax_uneven_batch_norm": "mean_of_means",
    "fsdp2_adapter_of_rank_0": "found",
    "fsdp2_different_start": "copies_differ",
    "fsdp2_ignored_parameters": "one_replica_only",
    "fsdp2_infinite_norm": "found",
    "fsdp2_local_norm": "equal",
    "jax_grad_of_psum": "one_replica_only",
    "jax_rows_in_shard_map": "found",
    "keras_distribution_uneven_rows": "mean_of_means",
    "lightning_auc": "mean_of_means",
    "lightning_floor": "mean_of_means",
    "lightning_score_of_rank_0": "one_replica_only",
    "loader_numpy_seed": "no devices",
    "loader_padded_rows": "data_depends_on_replicas",
    "loader_rows_of_all_ranks": "data_depends_on_replicas",
    "loader_same_order": "found",
    "tf_batch_norm": "mixes_rows",
    "tf_clipped_replicas": "per_replica_function",
    "tf_loss_of_first_replica": "equal",
    "tf_mean_of_shares": "scaled_by_replicas",
    "tf_own_loss_class": "equal",
    "tf_sum_of_means": "scaled_by_replicas",
    "tf_uneven_rows": "mean_of_means",
    "torchmetrics_mean_of_batches": "mean_of_means",
    "torchmetrics_repeated_rows": "data_depends_on_replicas",
    "trainer_accumulated_tokens": "no devices",
    "trainer_dropout": "same_random_numbers",
    "trainer_eval_loss": "scaled_by_replicas",
    "trainer_last_accumulation": "no devices",
    "trainer_tensor_parallel_loss": "scaled_by_replicas",
    "trainer_tokens_of_a_rank": "mean_of_means",
}


class Exhibit:
    """The training of a script, for `ks.verify_processes`; its number is observed.

    Args:
        name: str, the script.
    """

    def __init__(self, name: str):
        self.name = self.__name__ = name

    def load(self) -> Callable[[], Any]:
        """Imports the script without its measurements."""
        common = importlib.import_module("museum.common")
        found: list[Callable[[], Any]] = []
        steps = {
            "exhibit_ranks": lambda doc, step, ours: found.append(lambda: _rank(step)),
            "exhibit_scopes": lambda doc, train: found.append(lambda: _scope(train)),
            "exhibit_devices": lambda doc, step, ours: found.append(
                lambda: step(devices())
            ),
            "exhibit": lambda *measured: None,
        }
        originals = {name: getattr(common, name) for name in steps}
        try:
            for name, step in steps.items():
                setattr(common, name, step)
            importlib.import_module(f"museum.{self.name}")
        finally:
            for name, original in originals.items():
                setattr(common, name, original)
        if found:
            self._train = found[0]
        return self._train

    def __call__(self) -> None:
        import keras_strategies as ks

        ks.observe(number=self._train())


def _rank(step: Callable[[int, int], Any]) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return step(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _scope(train: Callable[[Any], Any]) -> Any:
    import tensorflow as tf

    if len(devices()) == 1:
        return train(contextlib.nullcontext())
    return train(tf.distribute.MirroredStrategy(devices()).scope())
