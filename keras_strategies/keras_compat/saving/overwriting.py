"""Files that `save(overwrite=False)` may not replace without a question."""

from __future__ import annotations

import os
from typing import Any


def may_replace(path: Any) -> bool:
    """Whether a file does not exist, or the user answers that it may be replaced.

    Keras 3.15 asks the same in `save`, about the path that it is given: with a strategy
    that is a temporary one.
    """
    from keras.src.utils import io_utils

    if not isinstance(path, str | os.PathLike) or not os.path.exists(path):
        return True
    return bool(io_utils.ask_to_proceed_with_overwrite(os.fspath(path)))
