"""Accelerators of PyTorch in Python: devices with their own memory, on any machine.

Each device has memory, random numbers and a thread of autograd of its own; the current
device and streams belong to threads, as those of a GPU. Operations are found by
PyTorch's dispatcher. They compute on the CPU, on the same memory, and raise if a tensor
of another device, other than a scalar, is among their arguments.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sysconfig
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration, dlpack

KIND = "simulated"
_SOURCE = Path(__file__).with_name("accelerator_devices.cpp")
_FOLDER = _SOURCE.parents[2] / ".test-references"
_libraries: list[Any] = []
#: What the host has waited for: the operations whose results it reads.
waits: list[str] = []


# --- Tensors, by DLPack -----------------------------------------------------------

_CPU, _EXTENSION = 1, 12  # The types of devices there.
_CODES = {
    torch.bool: 6,
    torch.uint8: 1,
    torch.bfloat16: 4,
    torch.complex64: 5,
    torch.complex128: 5,
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), 0),
    **dict.fromkeys((torch.float16, torch.float32, torch.float64), 2),
}


class _Managed(ctypes.Structure):
    """A `DLManagedTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_index", ctypes.c_int),
        ("dims", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("owner", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_retain = ctypes.pythonapi.Py_IncRef
_retain.argtypes = (ctypes.py_object,)


def _alias(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on another device, with the memory of this one."""
    dims = tensor.dim()
    sizes = ctypes.c_int64 * dims
    shape, strides = sizes(*tensor.shape), sizes(*tensor.stride())
    managed = _Managed(
        data=tensor.data_ptr(),
        device_type=_CPU if device.type == "cpu" else _EXTENSION,
        device_index=device.index or 0,
        dims=dims,
        code=_CODES[tensor.dtype],
        bits=8 * tensor.element_size(),
        lanes=1,
        shape=shape,
        strides=strides,
        deleter=_deleter(),
    )
    # Released when the memory of the alias is.
    owner = (managed, shape, strides, tensor)
    managed.owner = id(owner)
    _retain(owner)
    return dlpack.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


@functools.cache
def _deleter() -> int | None:
    return ctypes.cast(_library().release_owner, ctypes.c_void_p).value


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return _alias(tensor, _HOST) if tensor.device.type == KIND else tensor


def _as_strided(tensor: torch.Tensor, *sizes: Any) -> torch.Tensor:
    """A view: the kernel of the CPU is for any tensor with memory."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return torch.ops.aten.as_strided.default.redispatch(keys, tensor, *sizes)


# --- Operations -------------------------------------------------------------------

_HOST = torch.device("cpu")
# Of operations that return a number, or as many elements as values say.
_READ_BY_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Call:
    """The arguments of an operation on the host, and the device of its results."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._is_named = False
        # Tensors of devices, by the identity of their aliases on the host.
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_on_host(value)
        if isinstance(value, torch.device):
            self._is_named, self.device = True, _with_index(value)
            return _HOST
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.on_host, value))
        return value

    def _tensor_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != KIND and not tensor.dim():
            return tensor
        if self.device is None:
            self.device = tensor.device
        if tensor.device != self.device and not self._is_named:
            raise RuntimeError(
                "Expected all tensors to be on the same device, found "
                f"{self.device} and {tensor.device}."
            )
        # What has no elements may be resized.
        host = (
            _on_host(tensor)
            if tensor.numel()
            else torch.empty_like(tensor, device=_HOST)
        )
        self.given[id(host)] = host, tensor
        return host

    def on_device(self, value: Any) -> Any:
        """A result; what the operation has written into stays the same tensor."""
        if isinstance(value, torch.Tensor):
            return self._tensor_on_device(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.on_device, value))
        return value

    def _tensor_on_device(self, value: torch.Tensor) -> torch.Tensor:
        if id(value) in self.given:
            return self.given[id(value)][1]
        assert self.device is not None
        storage = value.untyped_storage()._cdata
        for host, tensor in self.given.values():
            if host.untyped_storage()._cdata == storage and host.dtype == value.dtype:
                offset = tensor.storage_offset() + value.storage_offset()
                return _as_strided(tensor, value.shape, value.stride(), offset)
        return value if self.device == _HOST else _alias(value, self.device)

    def take_resized(self) -> None:
        for host, tensor in self.given.values():
            if host.shape != tensor.shape:
                tensor.data = _alias(host, tensor.device)


def _with_index(device: torch.device) -> torch.device:
    if device.type != KIND or device.index is not None:
        return device
    return torch.device(KIND, torch.accelerator.current_device_index())


def _compute(operation: Any, *arguments: Any, **options: Any) -> Any:
    """Any operation: that of the CPU, on the same memory."""
    with torch._C.DisableTorchFunction():
        call, tags = _Call(), operation.tags
        if _READ_BY_HOST & set(tags):
            waits.append(str(operation))
        host = call.on_host(arguments)
        host_options = {key: call.on_host(value) for key, value in options.items()}
        if _has_number_for_tensor(operation, arguments):
            operation = operation.overloadpacket  # Numbers arrive without their tensor.
        if torch.Tag.nondeterministic_seeded in tags:
            found = _draw(call.device, operation, host, host_options)
        else:
            found = operation(*host, **host_options)
        call.take_resized()
        return call.on_device(found)


def _has_number_for_tensor(operation: Any, arguments: Any) -> bool:
    return any(
        isinstance(value, (int, float)) and isinstance(argument.type, torch.TensorType)
        for value, argument in zip(arguments, operation._schema.arguments, strict=False)
    )


def _convolution(*arguments: Any) -> Any:
    return _compute(torch.ops.aten.convolution.default, *arguments)


def _convolution_backward(gradient: Any, *arguments: Any) -> Any:
    *arguments, mask = arguments
    operation = torch.ops.aten.convolution_backward.default
    # The sizes of a bias, which is there if its gradient is wanted.
    bias = [arguments[1].shape[0]]
    return _compute(operation, gradient, *arguments[:2], bias, *arguments[2:], mask)


def _copy(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A transfer."""
    if target.device.type != KIND:
        waits.append("copy to the host")
    with torch._C.DisableTorchFunction():
        _on_host(target).copy_(_on_host(source))
    return target


# --- Random numbers -----------------------------------------------------------------

_drawing = threading.Lock()
# Of generators, by their address.
_devices: dict[int, torch.device] = {}


class _Generator(torch.Generator):
    """A generator of the CPU that belongs to a device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, "cpu")
        # The dispatcher hands on other objects for the same generator.
        _devices[made._cdata] = _with_index(torch.device(device))
        weakref.finalize(made, _devices.pop, made._cdata)
        return made

    @property
    def device(self) -> torch.device:
        return _devices[self._cdata]


def _draw(device: Any, operation: Any, arguments: Any, options: Any) -> Any:
    """An operation that draws, from the generator that is given or the device's."""
    given = options.get("generator")
    if given is not None:
        found = _devices.get(given._cdata, given.device)
        if found != device:
            raise RuntimeError(f"Expected a generator of {device}, not of {found}.")
        return operation(*arguments, **options)
    own, process = _module.default_generators[device.index], torch.default_generator
    with _drawing:
        before = process.get_state()
        process.set_state(own.get_state())
        try:
            return operation(*arguments, **options)
        finally:
            own.set_state(process.get_state())
            process.set_state(before)


# --- The devices ----------------------------------------------------------------------


class _Module:
    """`torch.simulated`."""

    def __init__(self) -> None:
        self.default_generators: list[_Generator] = []

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.default_generators)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Any) -> None:
        torch.accelerator.set_device_index(device)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any) -> torch.Tensor:
        return self.default_generators[torch.device(device).index or 0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any) -> None:
        self.default_generators[torch.device(device).index or 0].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_module = _Module()


@functools.cache
def _library() -> ctypes.PyDLL:
    """The compiled source, which is kept for later runs."""
    folder = Path(torch.__file__).parent
    source = _SOURCE.read_bytes() + torch.__version__.encode()
    file = _FOLDER / f"accelerator-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-o", str(part)]
        command += [f"-I{folder / 'include'}", f"-I{sysconfig.get_path('include')}"]
        command += [str(_SOURCE), f"-L{folder / 'lib'}", "-lc10"]
        subprocess.run(command, check=True)
        part.rename(file)
    return ctypes.PyDLL(str(file))


def install(count: int = 1) -> None:
    """Adds accelerators to this process."""
    if not _library().register_devices(count):
        raise RuntimeError("This process has other devices of the type PrivateUse1.")
    # Registers what is left besides devices.
    backend_registration._setup_privateuseone_for_python_backend(KIND, _module)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    transfers = torch.library.Library("aten", "IMPL")
    transfers.impl("_copy_from", _copy, "PrivateUse1")
    transfers.impl("as_strided", _as_strided, "PrivateUse1")
    convolutions = {"": _convolution, "_backward": _convolution_backward}
    for name, function in convolutions.items():
        transfers.impl(f"convolution{name}_overrideable", function, "PrivateUse1")
    # Below a dispatch mode Torch finds no fallback for what it calls itself.
    for name in ("empty.memory_format", "empty_strided"):
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        function = functools.partial(_compute, operation)
        transfers.impl(name, function, "PrivateUse1")
    _libraries.extend((everything, transfers))
    torch.Generator = _Generator  # type: ignore[misc]
    _module.default_generators = [
        _Generator(torch.device(KIND, i)).manual_seed(0) for i in range(count)
    ]


def _code_of_torch(code: types.CodeType) -> types.CodeType:
    """Code in a file of Torch: a device is none of the user's code in row proofs."""
    inner = tuple(
        _code_of_torch(each) if isinstance(each, types.CodeType) else each
        for each in code.co_consts
    )
    return code.replace(co_filename=torch.__file__, co_consts=inner)


for _owner in (globals(), vars(_Call), vars(_Generator)):
    for _each in list(_owner.values()):
        if isinstance(_each, types.FunctionType) and _each.__module__ == __name__:
            _each.__code__ = _code_of_torch(_each.__code__)
