"""Environment variables that launchers set for one process."""

from __future__ import annotations

# `srun --nodes=3 --ntasks=5` under `--gres=gpu:4`, the fourth process.
SLURM = {
    "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_STEP_NODELIST": "gpu[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_DISTRIBUTION": "block",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}
