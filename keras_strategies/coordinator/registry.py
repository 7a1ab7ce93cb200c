"""The coordinator's variables: names without values, which the servers have."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import keras
import numpy as np

from keras_strategies import keras_compat
from keras_strategies.coordinator.dispatch import LocalVariables
from keras_strategies.coordinator.pickling import Described, Part, Receiver, dump, load
from keras_strategies.coordinator.servers import Servers
from keras_strategies.coordinator.updates import OptimizerSpec
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.variables.partitioners import PartitionFunction, bytes_per_element
from keras_strategies.variables.placement import RoundRobin

#: Variables up to this size begin with exactly the numbers that they would have
#: without a strategy: they are made here and cut. Larger ones are made in parts.
_WHOLE_BYTES = 64 << 20
_STREAMED_BYTES = 32 << 20


class Registry:
    """Gives variables numbers and places (`keras_compat.VariableHost`).

    Args:
        servers: the parameter servers.
        partitioner: how variables are cut, None for not at all.
        local: keeps metrics' variables.
        lazy_rows: bool, see `ParameterServerStrategy`.
    """

    is_local = False

    def __init__(
        self,
        servers: Servers,
        partitioner: PartitionFunction | None,
        local: LocalVariables,
        lazy_rows: bool,
    ):
        self._servers = servers
        self._places = RoundRobin(len(servers), partitioner)
        self._local = local
        self._lazy_rows = lazy_rows
        self._numbers = itertools.count()
        self._objects: dict[int, Any] = {}
        self._described: dict[int, Described] = {}
        self._number_of_id: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self._variables: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )
        self._optimizers: dict[int, int] = {}
        self._generation = itertools.count()
        self._lock = threading.RLock()
        #: Variables with more bytes than this are saved and loaded in pieces.
        self.streamed_bytes = _STREAMED_BYTES

    # Making variables

    def create(self, variable: Any, value: Any) -> None:
        array = np.asarray(keras.ops.convert_to_numpy(value))
        self._register(variable, tuple(array.shape))
        self._begin(variable, lambda start, stop: array[start:stop], array)

    def create_with(self, variable: Any, initializer: Callable[..., Any]) -> None:
        shape = tuple(int(n) for n in variable._shape)
        dtype = variable._dtype
        about = self._register(variable, shape)
        nbytes = math.prod(shape) * bytes_per_element(dtype)
        is_constant = isinstance(initializer, _CONSTANTS)
        if about.kind == "local" or (nbytes <= _WHOLE_BYTES and not is_constant):
            value = initializer(shape, dtype=dtype)
            array = np.asarray(keras.ops.convert_to_numpy(value))
            self._begin(variable, lambda start, stop: array[start:stop], array)
            return
        if not is_constant:
            initializer = _of_parts(initializer, shape)

        def part(start: int, stop: int) -> bytes:
            part_shape = (stop - start, *shape[1:]) if shape else ()
            make = functools.partial(
                make_initial, initializer, part_shape, dtype, start
            )
            return cloudpickle.dumps(make)  # type: ignore[no-any-return]

        self._begin(variable, part, None)

    def _register(self, variable: Any, shape: tuple[int, ...]) -> Described:
        with self._lock:
            number = next(self._numbers)
            kind, reference = self._kind(variable, shape)
            dtype = variable._dtype
            if kind == "local":
                parts: tuple[Part, ...] = ()
            elif kind == "scalar":
                parts = tuple(Part(i, 0, 1) for i in range(len(self._servers)))
            elif reference is not None:
                parts = self.describe(reference).parts
                self._references[number] = self.describe(reference).number
            else:
                placed = self._places.place(shape, dtype)
                parts = tuple(Part(p.server, p.start, p.stop) for p in placed)
            about = Described(
                number, variable.path, shape, dtype, variable.trainable, kind, parts
            )
            self._described[number] = about
            self._number_of_id[id(variable)] = number
            self._variables[number] = variable
            weakref.finalize(variable, self._number_of_id.pop, id(variable), None)
            return about

    def _kind(self, variable: Any, shape: tuple[int, ...]) -> tuple[str, Any]:
        if variable.synchronization == "on_read":
            return "local", None
        reference = keras_compat.slot_reference()
        if reference is not None:
            return "slot", reference
        maker = keras_compat.variable_maker()
        if maker is None or not keras_compat.is_optimizer(maker):
            return "weight", None
        keras_compat.plain_optimizer(maker)
        _check_scalar(maker, variable, shape)
        return "scalar", None

    def _begin(
        self, variable: Any, part: Callable[[int, int], Any], whole: Any
    ) -> None:
        about = self.describe(variable)
        if about.kind == "local":
            self._local.set(about.number, whole)
            return
        by_server: dict[int, list[Any]] = {}
        for each in about.parts:
            value = part(each.start, each.stop) if about.shape else whole
            if not about.shape and whole is None:
                value = part(0, 1)
            by_server.setdefault(each.server, []).append(
                ((about.number, each.start), value)
            )
        self._servers.ask_all("create", by_server)

    # Using variables

    def describe(self, variable: Any) -> Described:
        """What workers and servers are told of a variable."""
        number = self._number_of_id.get(id(variable))
        if number is None:
            raise InvalidArgumentError(
                f"Variable {variable.path!r} was made outside of the strategy's scope, "
                "so no parameter server has it. Move the lines that make it into "
                "`with strategy.scope():`."
            )
        about = self._described[number]
        regularized = variable.regularizer is not None
        if (about.trainable, about.regularized) != (variable.trainable, regularized):
            about = dataclasses.replace(
                about, trainable=bool(variable.trainable), regularized=regularized
            )
            self._described[number] = about
        return about

    def variable(self, number: int) -> Any:
        """The variable with a number."""
        return self._variables[number]

    def read(self, variable: Any) -> np.ndarray:
        about = self.describe(variable)
        if about.kind == "local":
            return self._local.get(about.number)
        return self._servers.read(about)

    def read_slice(self, variable: Any, index: Any) -> np.ndarray:
        """What indexing as NumPy's gives, from as few rows as possible."""
        about = self.describe(variable)
        if about.kind == "local" or not about.shape:
            return self.read(variable)[index]  # type: ignore[no-any-return]
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) else (index, ())
        is_rows = isinstance(first, (int, np.integer, slice)) or (
            isinstance(first, (list, np.ndarray))
            and np.asarray(first).dtype.kind in "iu"
        )
        if not is_rows:
            return self.read(variable)[index]  # type: ignore[no-any-return]
        chosen = np.arange(about.shape[0])[first]
        found = self._servers.rows(about, np.atleast_1d(chosen).reshape(-1))
        found = found.reshape(*chosen.shape, *about.shape[1:])
        if not rest:
            return found
        return found[(*[slice(None)] * chosen.ndim, *rest)]  # type: ignore[no-any-return]

    def write(self, variable: Any, value: Any) -> None:
        about = self.describe(variable)
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if about.kind == "local":
            self._local.set(about.number, array)
        else:
            self._servers.write(about, array)

    def add(self, variable: Any, delta: Any) -> Any:
        about = self.describe(variable)
        array = np.asarray(keras.ops.convert_to_numpy(delta), self.read(variable).dtype)
        array = np.broadcast_to(array, about.shape)
        if about.kind == "local":
            self._local.add({about.number: array})
        else:
            self._servers.add(about, array)
        return variable.value

    def is_large(self, variable: Any) -> bool:
        """Whether files are written from it, and into it, piece by piece."""
        about = self.describe(variable)
        if about.kind == "local" or not about.shape:
            return False
        nbytes = math.prod(about.shape) * bytes_per_element(about.dtype)
        return nbytes > self.streamed_bytes

    def pieces(self, variable: Any) -> Iterator[tuple[int, np.ndarray]]:
        return self._servers.pieces(self.describe(variable))

    def write_rows(self, variable: Any, start: int, rows: np.ndarray) -> None:
        self._servers.write_rows(self.describe(variable), start, rows)

    def place(self, variable: Any) -> str:
        """Where a variable is, for its representation."""
        about = self.describe(variable)
        if about.kind == "local":
            return f"on the coordinator, value={self._local.get(about.number)}"
        if about.kind == "scalar":
            return f"on every parameter server, value={self.read(variable)}"
        names = [f"ps:{p.server} [{p.start}:{p.stop}]" for p in about.parts]
        if len(names) == 1:
            return f"on ps:{about.parts[0].server}"
        return f"{len(names)} parts on {', '.join(names)}"

    # Sending things

    def number_of(self, made: Any) -> int:
        """The number of a Keras object, which lives as long as this registry."""
        with self._lock:
            for number, found in self._objects.items():
                if found is made:
                    return number
            number = len(self._objects)
            self._objects[number] = made
            return number

    def dump(
        self, value: Any, is_strategy: Callable[[Any], bool]
    ) -> tuple[bytes, int, dict[int, Described], list[Any]]:
        """Pickles something for workers.

        Returns:
            The bytes, their generation, the variables in them, and the optimizers.
        """
        seen: list[Any] = []

        def number_of(made: Any) -> int:
            seen.append(made)
            return self.number_of(made)

        blob, variables = dump(value, self.describe, number_of, is_strategy)
        optimizers = [made for made in seen if keras_compat.is_optimizer(made)]
        return blob, next(self._generation), variables, optimizers

    def _constraints(self, optimizer: Any) -> dict[int, Any]:
        found = {}
        for variable in keras_compat.trained_variables(optimizer):
            about = self.describe(variable)
            if variable.constraint is None:
                continue
            if len(about.parts) > 1:
                raise InvalidArgumentError(
                    f"Variable {variable.path!r} has the constraint "
                    f"{variable.constraint!r}, which is of the whole variable, and is "
                    f"cut into {len(about.parts)} parts. Leave it whole: let "
                    "`variable_partitioner` return 1 for its shape."
                )
            found[about.number] = variable.constraint
        return found

    def _check_optimizer(self, optimizer: Any) -> None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise InvalidArgumentError(
                "A LossScaleOptimizer changes its scale by what all gradients of a "
                "step are, which no parameter server sees. Use the dtype policy "
                "'mixed_bfloat16', which needs no loss scale, or compile with "
                "`auto_scale_loss=False`."
            )
        clips = optimizer.clipnorm or optimizer.global_clipnorm
        if optimizer.gradient_accumulation_steps and clips:
            raise InvalidArgumentError(
                "`gradient_accumulation_steps` with `clipnorm` or `global_clipnorm` "
                "clips sums of gradients by norms of whole ones, which no parameter "
                "server sees. Use `clipvalue`, or larger batches."
            )

    def _put_everywhere(self, optimizer: Any, variable: Any) -> None:
        """Gives every server an optimizer's scalar, such as Nadam's, made unnamed."""
        about = self.describe(variable)
        if about.kind == "scalar":
            return
        _check_scalar(optimizer, variable, about.shape)
        value = self.read(variable)
        everywhere = tuple(Part(i, 0, 1) for i in range(len(self._servers)))
        self._described[about.number] = dataclasses.replace(
            about, kind="scalar", parts=everywhere
        )
        part = ((about.number, 0), value)
        self._servers.ask_all("create", {p.server: [part] for p in everywhere})

    def send_optimizer(self, optimizer: Any, is_strategy: Any) -> None:
        """Gives the servers an optimizer, unless they have it."""
        self._check_optimizer(optimizer)
        number = self.number_of(optimizer)
        if self._optimizers.get(number) == len(optimizer.variables):
            return
        self._optimizers[number] = len(optimizer.variables)
        for variable in optimizer.variables:
            if self.describe(variable).kind == "weight":
                self._put_everywhere(optimizer, variable)
        blob, _, _, _ = self.dump(optimizer, is_strategy)
        trained = [self.describe(v) for v in keras_compat.trained_variables(optimizer)]
        slots: dict[int, list[int]] = {about.number: [] for about in trained}
        scalars = []
        for variable in optimizer.variables:
            about = self.describe(variable)
            if about.kind == "slot":
                slots[self._references[about.number]].append(about.number)
            else:
                scalars.append(about.number)
        decays = {
            self.describe(v).number: keras_compat.weight_decay_applies(optimizer, v)
            for v in keras_compat.trained_variables(optimizer)
        }
        make = functools.partial(
            make_spec,
            blob,
            number,
            tuple(scalars),
            {n: tuple(own) for n, own in slots.items()},
            decays,
            self._constraints(optimizer),
            not self._lazy_rows,
        )
        pickled = cloudpickle.dumps(make)
        servers = range(len(self._servers))
        self._servers.ask_all("optimizer", dict.fromkeys(servers, (number, pickled)))


_CONSTANTS = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


def _check_scalar(optimizer: Any, variable: Any, shape: tuple[int, ...]) -> None:
    if shape:
        raise InvalidArgumentError(
            f"Optimizer {type(optimizer).__name__} keeps a variable of shape {shape}, "
            f"{variable.path!r}, which belongs to no variable of its shape, so it "
            "cannot be cut and placed as they are. Parameter servers take optimizers "
            "whose variables come from `add_variable_from_reference`, such as SGD, "
            "Adagrad, Adam, AdamW, RMSprop, Ftrl and Lion."
        )


class _Templates(Receiver):
    """Variables of an optimizer on a server, which have a place and no value."""

    def __init__(self) -> None:
        super().__init__()
        self.templates: dict[int, Any] = {}

    def variable(self, described: Described) -> Any:
        if described.number not in self.templates:
            empty = np.zeros([min(n, 1) for n in described.shape], "float32")
            template = keras_compat.make_variable(
                described.path, described.trainable, described.dtype, empty
            )
            keras_compat.set_variable_shape(template, described.shape)
            self.templates[described.number] = template
        return self.templates[described.number]


def make_spec(blob: bytes, number: int, *rest: Any) -> OptimizerSpec:
    """An optimizer as servers use it, from what was pickled here."""
    receiver = _Templates()
    optimizer = load(blob, receiver, 0)
    return OptimizerSpec(number, optimizer, receiver.templates, *rest)


def make_initial(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str, start: int
) -> np.ndarray:
    """The first values of a part, made where the part will be."""
    if hasattr(initializer, "seed") and isinstance(initializer.seed, int):
        # Parts differ, however many there are on a server.
        initializer.seed = (initializer.seed + start * 1_000_003) % 2**31
        setattr(initializer, "_init_seed", initializer.seed)  # noqa: B010
    value = initializer(shape, dtype=dtype)
    return np.asarray(keras.ops.convert_to_numpy(value))


def _of_parts(initializer: Any, shape: tuple[int, ...]) -> Any:
    """An initializer that makes of parts what another one makes of a whole."""
    names = keras.initializers
    independent = (names.RandomNormal, names.RandomUniform, names.TruncatedNormal)
    if isinstance(initializer, independent):
        return initializer
    if isinstance(initializer, names.VarianceScaling):
        receptive = math.prod(shape[:-2])
        into, out = shape[-2] * receptive, shape[-1] * receptive
        fans = {"fan_in": into, "fan_out": out, "fan_avg": (into + out) / 2}
        variance = initializer.scale / max(1.0, fans[initializer.mode])
        seed = initializer.seed
        if initializer.distribution == "uniform":
            limit = math.sqrt(3 * variance)
            return names.RandomUniform(-limit, limit, seed=seed)
        if initializer.distribution == "truncated_normal":
            # The spread of a normal distribution that is cut at two deviations.
            deviation = math.sqrt(variance) / 0.87962566103423978
            return names.TruncatedNormal(0.0, deviation, seed=seed)
        return names.RandomNormal(0.0, math.sqrt(variance), seed=seed)
    raise InvalidArgumentError(
        f"A variable of shape {shape} is too large to be made in one piece, and "
        f"{type(initializer).__name__} cannot make it in parts. Use a normal, uniform "
        "or constant initializer."
    )
