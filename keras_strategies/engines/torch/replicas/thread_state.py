"""Torch's state of a thread, carried from the caller to the threads of replicas.

A replica computes on a thread of its own what the caller's thread computes on one
device, so it has the caller's state of Torch, at the time of the call: in the forward
pass that of the layer call, in the backward pass that of the thread of autograd, which
has that of the call of `backward`.

# State of a thread

- Gradients on or off; inference mode: the caller's, since the same operations are
  differentiated.
- Forward-mode switch: not carried; outside of a level it has no effect.
- Levels of `torch.func`, levels of `forward_ad`: the call is not split; `run` raises,
  since derivatives belong to levels of the thread, and the boundary has none for
  them.
- Autocast: switch and dtype of each type of device, use of the cache: the caller's,
  for the same dtypes; the cache has separate entries for each replica's copies.
- `saved_tensors_hooks`, `save_on_cpu`: the innermost of the caller, since only the
  innermost acts; hooks are called from several threads.
- `disable_saved_tensors_hooks`: not carried; no number depends on it.
- Function and dispatch modes: the caller's, called from several threads, to see the
  same functions.
- Default device (`with torch.device`): the replica's, if the default is a device of a
  replica, else the caller's; new tensors are combined with those of the replica.
- Autograd's threads: not used; a replica would wait for another replica's backward
  pass, or for the one that waits for it.
- Current device: the replica's, since `device="cuda"` means the replica's.
- Current streams: the caller's, of all devices of replicas; in the backward pass
  those of the forward pass, since what the caller has made is ordered before, and
  what it does next after, without events.
- Kernel threads (`set_num_threads`): an equal share of the process's, since replicas
  on CPUs compete for cores.
- Flushing of denormal numbers: the caller's, since it is a register of the thread.
- Python's context variables: a copy of the caller's, since those of NumPy and of
  users act in a layer.
- Keras's scopes: names, autocast, stateless, `keras.device`: the caller's, with the
  replica's device.
- Random numbers: those of own rows (`row_numbers.py`). Replicas that draw take turns,
  each with its own states of the process's generators (`replica_generators.py`); in
  calls of Keras's own layers each takes its seeds from a copy (`block_draws.py`).
- Profiler (`ThreadLocalDebugInfo`, `RecordFunction`): not carried; a profile needs
  `profile_all_threads`; no number depends on it.
- `view_replay`, Python dispatcher, functionalization: not carried; only used while a
  program is traced, which does not split calls.
- Switches of DTensor: not carried; strategies with DTensors have no threads.
- Objects of TorchInductor (`ThreadLocalPythonObjects`): not carried; CUDA graphs of a
  compiled function belong to its thread.
- Dynamo's callback: not carried; programs of layer calls are made without Dynamo.
- Disabled `__torch_function__`: not carried; it is a state inside of one operation.

# State of the process, which replicas share

- Default dtype, deterministic algorithms, TF32 and reduced precision, cuDNN flags,
  backends of attention and of linear algebra, anomaly detection: set once, read by
  each operation; a context around a call is open until all replicas have ended.
- The default generators: those of the replica whose turn it is.
- Attributes of layers, globals, closures: replicas take turns where code of users runs.
- Cached casts of autocast: locked; the first replica to end empties it, and others
  cast again.
- Mirrors of variables: keyed by variable, device and version; each replica writes
  only those of its device.
- CUDA's caching allocator: memory is used on the stream on which it was allocated,
  since streams are the caller's.
- Hooks of all modules (`register_module_forward_hook`): layer calls of `fit` are not
  split; in `run` they are called on each replica's thread.
- `torch.distributed`'s default group: not used, except with DTensors.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import graph

from keras_strategies.engines.torch.compat import (
    dispatch_modes,
    function_modes,
    pushed_dispatch_mode,
    pushed_function_mode,
    saved_tensors_hooks_of_thread,
)

# The smallest number; half of it is zero where denormal numbers are flushed to zero.
_SMALLEST = 2.0**-1022


class Streams:
    """This thread's current streams of accelerators, other than the default ones.

    Args:
        devices: devices; CPUs among them have no streams.
    """

    def __init__(self, devices: Sequence[torch.device]):
        accelerators = {device for device in devices if device.type != "cpu"}
        streams = map(torch.accelerator.current_stream, accelerators)
        #: Context managers that make them current.
        self.contexts = [stream for stream in streams if stream.stream_id]

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which they are current in this thread."""
        if not self.contexts:
            return contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            for stream in self.contexts:
                stack.enter_context(stream)
            return stack.pop_all()


class CallerState:
    """The state of this thread, for threads of replicas.

    Args:
        devices: the devices of the replicas.
    """

    def __init__(self, devices: Sequence[torch.device]):
        self._devices = frozenset(devices)
        self._streams = Streams(devices)
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = {"cpu", *(device.type for device in devices)}
        self._autocast = {kind: _autocast_of(kind) for kind in kinds}
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._hooks = saved_tensors_hooks_of_thread()
        self._function_modes = function_modes()
        self._dispatch_modes = dispatch_modes()
        self._flushes = _flushes_denormals()
        self._variables = contextvars.copy_context()

    def run(self, device: torch.device, task: Callable[[], Any]) -> Any:
        """Calls a function in this thread, with this state, for a replica's device."""
        # A context is entered by one thread at a time.
        return self._variables.copy().run(self._run, device, task)

    def _run(self, device: torch.device, task: Callable[[], Any]) -> Any:
        if _flushes_denormals() != self._flushes:
            torch.set_flush_denormal(self._flushes)
        # Autograd has one thread for each accelerator. A backward pass of another
        # replica, or one that waits for this task, may occupy it.
        with (
            torch.autograd.set_multithreading_enabled(False),
            contextlib.ExitStack() as stack,
        ):
            for context in self._contexts(device):
                stack.enter_context(context)
            with torch.set_grad_enabled(self._grad):
                return task()

    def _contexts(self, device: torch.device) -> Iterator[Any]:
        """Contexts of this state, other than those that each thread begins with."""
        yield from self._streams.contexts
        if device.type != "cpu":
            yield torch.accelerator.device_index(device.index)
        if self._inference:
            yield torch.inference_mode()
        for kind, wanted in self._autocast.items():
            if wanted != _autocast_of(kind):
                enabled, dtype = wanted
                cache = self._autocast_cache
                yield torch.autocast(kind, dtype, enabled, cache_enabled=cache)
        if self._hooks is not None:
            yield graph.saved_tensors_hooks(*self._hooks)
        for mode in self._function_modes:
            yield pushed_function_mode(self._on_replica(mode, device))
        for mode in self._dispatch_modes:
            yield pushed_dispatch_mode(mode)

    def _on_replica(self, mode: Any, device: torch.device) -> Any:
        """A function mode; a default device that replicas have is the own one."""
        if getattr(mode, "device", None) in self._devices:
            return type(mode)(device)
        return mode


def _autocast_of(kind: str) -> tuple[bool, torch.dtype]:
    """Whether operations on devices of a type are autocast, and to which dtype."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _flushes_denormals() -> bool:
    """Whether this thread flushes denormal numbers to zero."""
    return _SMALLEST / 2 == 0.0
