"""Tensors with values that come later in a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class LaterValue:
    """A tensor with a value that comes later; an engine's class is a tensor as well."""

    def put_off(self, variables: Iterable[Any]) -> None:
        """Lets variables that are updated with it have later values in the next steps.

        Whatever reads such a variable in a step waits for the value; all have been
        assigned when the step ends.

        Args:
            variables: the `keras.Variable`s of a metric.
        """
        raise NotImplementedError
