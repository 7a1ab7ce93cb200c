"""Files that the chief has saved, for workers that wait for them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SavedFile:
    """A call of the chief that saves a file.

    Args:
        name: str, of the file, without its folder; empty for other targets.
        error: str, the reason why it failed; empty if it succeeded.
    """

    name: str
    error: str


@dataclasses.dataclass(frozen=True)
class SaveWait:
    """A worker that waits for the chief to save a file.

    Args:
        index: int, the worker's.
        position: int, number of collectives that the worker has begun. Calls between
            two collectives correspond to each other.
        name: str, of the file in this worker's call, without its folder, which scripts
            may choose by the worker.
        same: int, number of its calls at this position with this name, this one
            included.
        calls: int, number of its calls at this position, this one included.
        any_name: bool, whether the chief's call with the same number suffices.
    """

    index: int
    position: int
    name: str
    same: int
    calls: int
    any_name: bool = False


class ChiefSaves:
    """Matches calls of the workers that save files with those of the chief.

    A worker waits for the call with the name of its file: the chief alone may save
    other files in between, for example in `ModelCheckpoint`. If the names differ, the
    chief has saved when it begins the next collective.
    """

    def __init__(self) -> None:
        self._saved: dict[int, list[SavedFile]] = {}
        self._waits: list[SaveWait] = []
        # Collectives that the chief has begun; all of them when it has left.
        self._begun: float = 0

    def save(self, position: int, file: SavedFile) -> None:
        """Records that the chief has saved a file."""
        self._saved.setdefault(position, []).append(file)

    def begin(self, number: int) -> None:
        """Records that the chief has begun a collective."""
        self._begun = number + 1
        # All workers have completed the one before.
        for position in [each for each in self._saved if each < number]:
            del self._saved[position]

    def leave(self) -> None:
        """Records that the chief has left."""
        self._begun = float("inf")

    def wait(self, wait: SaveWait) -> None:
        """Records that a worker waits."""
        self._waits.append(wait)

    def take_answers(self) -> list[tuple[SaveWait, str | None]]:
        """Workers that need not wait any longer.

        Returns:
            list of pairs: the wait, and the reason why there is no file, None if there
            is one.
        """
        found = [(wait, *answer) for wait in self._waits if (answer := self._of(wait))]
        answered = {wait for wait, _ in found}
        self._waits = [wait for wait in self._waits if wait not in answered]
        return found

    def _of(self, wait: SaveWait) -> tuple[str | None] | None:
        files = self._saved.get(wait.position, [])
        same = [file for file in files if file.name == wait.name]
        if len(same) >= wait.same:
            return (same[wait.same - 1].error or None,)
        if self._begun <= wait.position and not wait.any_name:
            return None
        if len(files) >= wait.calls:
            return (files[wait.calls - 1].error or None,)
        if self._begun <= wait.position:
            return None
        return ("it went on without saving. All workers must make the same calls",)
