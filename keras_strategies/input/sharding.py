"""The arithmetic of splitting, in pure functions."""

from __future__ import annotations

from keras_strategies.errors import InvalidArgumentError


def split_sizes(rows: int, parts: int) -> list[int]:
    """How many rows each part gets: as equal as can be, larger parts first.

    Args:
        rows: int, rows of the global batch, 0 or more.
        parts: int, 1 or more.

    Returns:
        list of `parts` ints that add up to `rows`.

    Raises:
        ValueError: for a negative number of rows or no parts.

    >>> split_sizes(7, 2), split_sizes(1, 4), split_sizes(13, 5)
    ([4, 3], [1, 0, 0, 0], [3, 3, 3, 2, 2])
    """
    if rows < 0 or parts < 1:
        raise InvalidArgumentError(
            "Rows are split into one part or more. "
            f"Received: rows={rows}, parts={parts}"
        )
    base, larger = divmod(rows, parts)
    return [base + 1] * larger + [base] * (parts - larger)
