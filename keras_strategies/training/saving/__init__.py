"""Checkpoints of custom loops, preemption, evaluation of checkpoints."""
