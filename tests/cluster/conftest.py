"""Environments without a cluster's variables."""

from __future__ import annotations

import os

import pytest

FOREIGN = ("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "SM_")
FOREIGN += ("KERAS_DISTRIBUTION_", "OMPI_", "PMI_", "MPI_", "MV2_")


@pytest.fixture
def environment(monkeypatch):
    """Without any cluster's variables; the tests set theirs."""
    for name in list(os.environ):
        if name.startswith((*FOREIGN, "TPU_", "GCE_")):
            monkeypatch.delenv(name)
    # What a resolver sets is taken back as well.
    for name in ("CUDA_VISIBLE_DEVICES", "KS_SLURM_GPUS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def set_all(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all
