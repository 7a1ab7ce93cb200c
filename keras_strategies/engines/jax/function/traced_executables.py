"""Executables of functions that are traced in each call, reused for equal traces.

The Python of such a function runs in every call, so no key of what it reads is needed:
two traces with the same StableHLO text, devices and layouts are the same program. The
text has the contents of arrays that a function closes over.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator

#: Maximum number of executables in a cache; the one unused for longest is dropped.
MAX_EXECUTABLES = 128
# Operations that call Python, of which the text has a number only.
_CALLS_PYTHON = re.compile(r"callback|stablehlo\.(send|recv)\b")


class TracedExecutables:
    """Compiled programs, by what has been traced."""

    def __init__(self) -> None:
        self._compiled: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        #: The number of programs that have been compiled.
        self.count = 0

    def run(
        self,
        function: Callable[..., Any],
        out_shardings: Any,
        args: tuple[Any, ...],
        workers: JaxCommunicator | None,
    ) -> Any:
        """Traces a function and runs its program.

        Args:
            function: a function of arrays, new in each call.
            out_shardings: as of `jax.jit`.
            args: structures of arrays.
            workers: the communicator between elastic workers; None otherwise.
        """
        lowered = jax.jit(function, out_shardings=out_shardings).lower(*args)
        text = lowered.as_text()
        places = [
            (array.sharding, array.committed) if isinstance(array, jax.Array) else None
            for array in jax.tree.leaves(args)
        ]
        shardings, structure = jax.tree.flatten(out_shardings)
        # `Compiled` checks the structures of arguments and results, and the shapes of
        # arguments that the program does not use, which the text does not have.
        shapes = tuple(jax.tree.leaves(lowered.in_avals))
        structures = (structure, lowered.in_tree, lowered.out_tree, shapes)
        key = (text, tuple(places), tuple(shardings), structures)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = lowered.compile()
            self.count += 1
            if not _CALLS_PYTHON.search(text):
                self._compiled[key] = compiled
                if len(self._compiled) > MAX_EXECUTABLES:
                    self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(key)
        if workers is None:
            return compiled(*args)
        return workers.executed(compiled, *args)
