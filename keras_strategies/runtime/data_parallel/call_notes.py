"""How calls of layers ran on replicas, for `describe` and the end of the first epoch.

Notes are of the calls that were made: what `DataParallelCall` has decided of each, and
the multiplications by weights that it took, which its first call counts. They say what
share of a step's arithmetic replicas have divided.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.keras_compat.models.layer_calls import noting_layer_calls
from keras_strategies.keras_compat.models.layers import own_layers
from keras_strategies.keras_compat.recorded_calls import unrecorded
from keras_strategies.keras_compat.structures import leaves_of

ALL_ROWS = "all rows"
ONE_PROGRAM = "one program"


@dataclass
class CallNote:
    """The calls of one layer so far.

    Args:
        split: int, calls that replicas have divided.
        on_all_rows: int, calls of all rows, the layers in it included.
        own_on_all_rows: int, such calls in which layers have notes of their own.
        how: str, how it was last called: `"split by type"`, `"all rows"`, ...
        why: str, why with all rows, as the end of a sentence.
        work: int, multiplications by weights for each row; None before a call.
        own_work: int, the same without the layers in it.
    """

    split: int = 0
    on_all_rows: int = 0
    own_on_all_rows: int = 0
    how: str = ""
    why: str = ""
    work: int | None = None
    own_work: int | None = None

    def divided(self, how: str) -> None:
        """Notes a call of which each replica has computed its rows."""
        self.split += 1
        self.how, self.why = how, ""

    def unsplit(self, why: str, has_notes_inside: bool) -> None:
        """Notes a call with all rows."""
        self.how, self.why = ALL_ROWS, why
        if has_notes_inside:
            self.own_on_all_rows += 1
        else:
            self.on_all_rows += 1

    def counting(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which counts its multiplications if none has done so."""
        if self.work is not None:
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            found: list[int] = []
            with noting_layer_calls(
                lambda inner, outputs: found.append(multiplications(inner, outputs))
            ):
                outputs = call(*args, **kwargs)
            self.work = sum(found) + multiplications(layer, outputs)
            return outputs

        return counted

    def count_own(self, layer: Any, outputs: Any) -> None:
        """Counts the multiplications of a call without the layers in it."""
        if self.own_work is None:
            self.own_work = multiplications(layer, outputs)


_notes: weakref.WeakKeyDictionary[Any, CallNote] = weakref.WeakKeyDictionary()


def note_of(layer: Any) -> CallNote:
    """The note of a layer's calls."""
    found = _notes.get(layer)
    if found is None:
        found = _notes[layer] = CallNote()
    return found


def note_program(model: Any) -> None:
    """Notes that a model's steps are one program over all devices.

    XLA divides it, and does not say which share of it each device computes.
    """
    _notes[model] = CallNote(how=ONE_PROGRAM)


def notes_of(layers: Iterable[Any]) -> dict[Any, CallNote]:
    """The notes of those layers that were called, in their order."""
    return {layer: _notes[layer] for layer in layers if layer in _notes}


def parallel_share(notes: Iterable[CallNote]) -> float | None:
    """The share of multiplications that replicas have divided; None without any."""
    divided = rest = 0
    for note in notes:
        divided += note.split * (note.work or 0)
        rest += note.on_all_rows * (note.work or 0)
        rest += note.own_on_all_rows * (note.own_work or 0)
    return divided / (divided + rest) if divided + rest else None


def share_text(share: float) -> str:
    """`97 % of the multiplications by weights`, never rounded up to all."""
    return f"{math.floor(100 * share)} % of the multiplications by weights"


def reason(layer: Any, note: CallNote) -> str:
    """Why a layer is called with all rows: `layer 'a' (Dense), because ...`."""
    kind = "model" if isinstance(layer, keras.Model) else "layer"
    return f"{kind} {layer.name!r} ({type(layer).__name__}), because {note.why}"


def multiplications(layer: Any, outputs: Any) -> int:
    """Multiplications by a layer's own weights for one row of its outputs.

    Of lookups in an `Embedding`, one for each number that is read.

    Args:
        layer: the `keras.layers.Layer`.
        outputs: structure of its outputs; the first tensor counts.
    """
    shape = next(
        (tuple(leaf.shape) for leaf in leaves_of(outputs) if hasattr(leaf, "shape")), ()
    )
    if len(shape) < 2 or any(n is None for n in shape[1:]):
        return 0
    entries = math.prod(int(n) for n in shape[1:])
    if isinstance(layer, keras.layers.Embedding):
        return entries
    # Properties of the user's may compute them, with calls that are no replica's.
    with unrecorded():
        inner = {id(v) for own in own_layers(layer) for v in own.variables}
        variables = layer.variables
    weights = [v for v in variables if id(v) not in inner and len(v.shape) > 1]
    if isinstance(layer, keras.layers.EinsumDense):
        # A bias of attention has two axes.
        weights = [v for v in weights if len(v.shape) == len(_kernel_labels(layer))]
    return sum(
        math.prod(weight.shape) * entries // _channels(layer, weight, shape)
        for weight in weights
    )


def _channels(layer: Any, weight: Any, shape: tuple[int, ...]) -> int:
    """The entries of the outputs at one position, each of its own weights."""
    if isinstance(layer, keras.layers.EinsumDense):
        sizes = dict(zip(_kernel_labels(layer), weight.shape, strict=True))
        result = layer.equation.partition("->")[2]
        return math.prod(sizes.get(label, 1) for label in result)
    is_first = getattr(layer, "data_format", "") == "channels_first"
    return int(shape[1 if is_first else -1])


def _kernel_labels(layer: Any) -> str:
    """`bc` of `ab,bc->ac`."""
    return str(layer.equation.partition("->")[0].rpartition(",")[2])
