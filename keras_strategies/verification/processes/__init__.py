"""Trainings of a function on processes or devices, compared with one of each."""
