"""Torch's state of a thread, carried from the caller to the threads of replicas.

A replica computes on a thread of its own what the caller's thread computes on one
device, so it has the caller's state of Torch, at the time of the call: in the forward
pass that of the layer call, in the backward pass that of the thread of autograd, which
has that of the call of `backward`. `docs/decisions/` has the list of Torch's
thread-local and process-wide state, and why each is right on replicas.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import graph

from keras_strategies.engines.torch.compat import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    has_forward_gradients,
    pushed_dispatch_mode,
    pushed_function_mode,
    saved_tensors_hooks_of_thread,
    why_saved_tensors_hooks_are_disabled,
    with_forward_gradients,
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
        self._streams = [stream for stream in streams if stream.stream_id]

    @contextlib.contextmanager
    def current(self, device: torch.device | None = None) -> Iterator[None]:
        """Makes them current in this thread, and also a device."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(stream)
            if device is not None and device.type != "cpu":
                stack.enter_context(torch.accelerator.device_index(device.index))
            yield


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
        self._forward_gradients = has_forward_gradients()
        self._autocast = _autocast({"cpu", *(device.type for device in devices)})
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._hooks = saved_tensors_hooks_of_thread()
        self._no_hooks = why_saved_tensors_hooks_are_disabled()
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
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            # Autograd has one thread for each accelerator. A backward pass of another
            # replica, or one that waits for this task, may occupy it.
            enter(torch.autograd.set_multithreading_enabled(False))
            enter(self._streams.current(device))
            if self._inference:
                enter(torch.inference_mode())
            enter(torch.set_grad_enabled(self._grad))
            if not self._forward_gradients:
                enter(with_forward_gradients(False))
            own = _autocast(self._autocast)
            for kind, (enabled, dtype) in self._autocast.items():
                if own[kind] != (enabled, dtype):
                    cache = self._autocast_cache
                    enter(torch.autocast(kind, dtype, enabled, cache_enabled=cache))
            if self._hooks is not None:
                enter(graph.saved_tensors_hooks(*self._hooks))
            if self._no_hooks is not None:
                enter(graph.disable_saved_tensors_hooks(self._no_hooks))
            for mode in self._function_modes:
                enter(pushed_function_mode(self._on_replica(mode, device)))
            for mode in self._dispatch_modes:
                enter(pushed_dispatch_mode(mode))
            return task()

    def _on_replica(self, mode: Any, device: torch.device) -> Any:
        """A function mode; a default device that replicas have is the own one."""
        if isinstance(mode, DeviceContext) and mode.device in self._devices:
            return DeviceContext(device)
        return mode


def _autocast(kinds: Any) -> dict[str, tuple[bool, torch.dtype]]:
    """By type of device, whether operations are autocast, and to which dtype."""
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in kinds
    }


def _flushes_denormals() -> bool:
    """Whether this thread flushes denormal numbers to zero."""
    return _SMALLEST / 2 == 0.0
