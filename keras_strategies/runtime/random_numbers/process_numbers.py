"""The random numbers of Python and NumPy, which all threads of a process share."""

from __future__ import annotations

import random

import numpy as np


class NumbersOfProcess:
    """The states of the generators of Python and NumPy now."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def are_unchanged(self) -> bool:
        are_equal = map(np.array_equal, self._numpy, np.random.get_state())
        return all(are_equal) and self._python == random.getstate()

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
