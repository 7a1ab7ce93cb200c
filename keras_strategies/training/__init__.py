"""Keras models under strategies, checkpoints, custom loops and preemption."""
