"""The scope in which models are planned: shapes without values."""

from __future__ import annotations

import keras


class AbstractScope(keras.StatelessScope):
    """Variables made inside have shapes and dtypes, and no values."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
