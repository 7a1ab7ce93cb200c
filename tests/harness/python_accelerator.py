"""An accelerator of PyTorch in Python: a device with its own memory, on any machine.

The memory of its tensors are hidden tensors of the CPU. Operations on them are found by
PyTorch's dispatcher, as those of a GPU: they raise if a tensor of another device, other
than a scalar, is among their arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import backend_registration

KIND = "simulated"
#: Hidden tensors by the storage of a tensor, and that tensor, which keeps it.
_memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
_libraries: list[torch.library.Library] = []


def _new(hidden: torch.Tensor) -> torch.Tensor:
    made = torch._C._acc.create_empty_tensor(hidden.shape, hidden.dtype)
    _memory[made.untyped_storage()._cdata] = hidden.contiguous(), made
    return made


def _hidden(tensor: torch.Tensor) -> torch.Tensor:
    return _memory[tensor.untyped_storage()._cdata][0]


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Tensor):
        if value.device.type == KIND:
            return _hidden(value)
        if value.dim():
            raise RuntimeError(f"Expected all tensors on {KIND}, found {value.device}.")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    return value


def _compute(operation: Any, *arguments: Any, **options: Any) -> Any:
    """Any operation: that of the CPU on the hidden tensors."""
    host = [_on_host(value) for value in arguments]
    host_options = {key: _on_host(value) for key, value in options.items()}
    found = operation(*host, **host_options)
    given = [*arguments, *options.values()]
    pairs = zip([*host, *host_options.values()], given, strict=True)
    # What it has written into stays the same tensor.
    same = {id(hidden): tensor for hidden, tensor in pairs}
    out = options.get("out")
    if isinstance(out, torch.Tensor) and out.shape != host_options["out"].shape:
        out.data = _new(host_options["out"])  # It was resized.

    def wrapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            own = same.get(id(value))
            return _new(value) if own is None else own
        if isinstance(value, (list, tuple)):
            return type(value)(map(wrapped, value))
        return value

    return wrapped(found)


def _copy(source: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A transfer."""
    one, other = (_hidden(t) if t.device.type == KIND else t for t in (source, target))
    other.copy_(one)
    return target


def install() -> None:
    """Adds the accelerator to this process."""
    backend_registration._setup_privateuseone_for_python_backend(KIND)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    transfers = torch.library.Library("aten", "IMPL")
    transfers.impl("_copy_from", _copy, "PrivateUse1")
    _libraries.extend((everything, transfers))
