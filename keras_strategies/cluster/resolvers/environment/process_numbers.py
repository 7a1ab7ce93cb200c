"""Number of a process among those of a launcher, from two environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

from keras_strategies.errors import ClusterError


@dataclass(frozen=True)
class RankAndSize:
    """The number of this process, among all processes or those of its machine.

    Args:
        rank: int, from 0.
        size: int, the number of processes; 0 if it is not known.
        variables: str, the environment variables, for errors.
    """

    rank: int
    size: int
    variables: str

    @classmethod
    def read(
        cls, rank: str, size: str, *, needs_size: bool = True
    ) -> RankAndSize | None:
        """The number in environment variables; None if they are not set.

        Args:
            rank: str, the name of the variable with the number of this process.
            size: str, that with the number of processes.
            needs_size: bool, whether one of them alone is an error; otherwise the size
                may be missing.

        Raises:
            ValueError: if one of them is missing or is not a number, or the rank is not
                below the size.
        """
        given = [name for name in (rank, size) if os.environ.get(name)]
        if not given or (given == [size] and not needs_size):
            return None
        if len(given) == 1 and needs_size:
            missing = size if given == [rank] else rank
            raise ClusterError(
                f"{given[0]} is {os.environ[given[0]]!r}, but {missing} is not set. "
                "A launcher sets both for each process. Set both, or unset "
                f"{given[0]} to train as one worker."
            )
        check_rank(rank, size)
        variables = " and ".join(f"{name}={os.environ[name]}" for name in given)
        return cls(number(rank), number(size) if size in given else 0, variables)


def number(name: str) -> int:
    """The number in an environment variable.

    Raises:
        ValueError: if it is not a number of 0 or more.
    """
    text = os.environ[name]
    if not text.strip().isdecimal():
        raise ClusterError(
            f"The environment variable {name} is {text!r}, not a number. Set it to a "
            "number of 0 or more, or unset it."
        )
    return int(text)


def check_rank(rank: str, size: str) -> None:
    """Checks that a rank is below its size, if both variables are set.

    Raises:
        ValueError: if it is not.
    """
    if not (os.environ.get(rank) and os.environ.get(size)):
        return
    if number(rank) >= number(size):
        raise ClusterError(
            f"{rank} is {number(rank)} and {size} is {number(size)}; ranks go from "
            "0 to the number of processes - 1. Correct one of the variables."
        )


def workers_of(first: str, size: int) -> list[str]:
    """The addresses of workers, from that of the first one only.

    The others appear under their rank, as `"rank-3"`, which is not an address: engines
    need only the first one.

    Args:
        first: str, the address of worker 0.
        size: int, the number of workers.
    """
    return [first, *(f"rank-{rank}" for rank in range(1, size))]
