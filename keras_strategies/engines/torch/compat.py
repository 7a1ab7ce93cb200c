"""All that this package uses of Torch beyond its public interface.

Tested with Torch 2.9 to 2.14. `PRIVATE_NAMES` has a row for each name;
`tests/keras_compat/test_manifest.py` fails if one is missing in the installed version.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import optree
import torch
import torch.distributed as dist
from torch import overrides
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from keras_strategies.keras_compat.private_names import Private
from keras_strategies.keras_compat.recorded_calls import unrecorded
from keras_strategies.runtime.thread_scheduling import scheduled_as_batch

__all__ = [
    "PRIVATE_NAMES",
    "StorageWeakRef",
    "TorchDispatchMode",
    "all_gather_into",
    "changed_buffers",
    "compile_call",
    "compile_graph",
    "computed_again",
    "create_gloo_group",
    "disabled_torch_function",
    "dispatch_modes",
    "fake_tensor_mode",
    "function_modes",
    "gloo_device",
    "has_global_hooks",
    "is_graph_retained",
    "is_transformed",
    "local_shard",
    "memory_tracker",
    "module_copy",
    "module_hooks",
    "pushed_dispatch_mode",
    "pushed_function_mode",
    "reduce_scatter_into",
    "saved_tensors_hooks_of_thread",
    "schema_arguments",
    "set_timeout",
    "shards_like",
    "spec_of",
    "storage_key",
    "tensor_without_memory",
    "tracked_bytes",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "version_of",
    "without_donated_buffers",
]

#: Options of `torch.compile`: no pool of compiler processes.
_IN_THIS_PROCESS = {"compile_threads": 1}
#: Numbers of contexts whose results programs compute again.
_numbers = itertools.count(1)

PRIVATE_NAMES = (
    Private(
        "torch.distributed.ProcessGroupGloo",
        ("_allgather_base", "_reduce_scatter_base"),
        "Rows of all workers are gathered into one tensor, and gradients of shards "
        "are summed from one.",
    ),
    Private(
        "torch.nn.Module",
        ("_replicate_for_data_parallel",),
        "Replicas call a torch module with their own copies of its parameters.",
    ),
    Private(
        "torch.multiprocessing.reductions",
        ("StorageWeakRef",),
        "Whether the memory of a gathered weight is still there.",
    ),
    Private("torch.Tensor", ("_version",), "Whether a tensor has changed in place."),
    Private(
        "torch.Tensor",
        ("_make_wrapper_subclass",),
        "Row parts: a tensor without memory of its own.",
    ),
    Private(
        "torch._C._autograd",
        ("_get_current_graph_task_keep_graph",),
        "Whether replicas retain the graph for a second backward pass.",
    ),
    Private(
        "torch._C._autograd",
        ("_top_saved_tensors_default_hooks",),
        "State of the caller's thread.",
    ),
    Private(
        "torch._C._functorch",
        ("peek_interpreter_stack",),
        "Calls in transforms of `torch.func` are not split.",
    ),
    Private(
        "torch._functorch.config",
        ("donated_buffer", "enable_autograd_cache", "force_non_lazy_backward_lowering"),
        "Compiled layer calls: two backward passes, and programs of functions.",
    ),
    Private(
        "torch._inductor.compile_fx",
        ("compile_fx", "compile_fx_inner"),
        "Compiled layer calls: a program of a function, and of its gradient.",
    ),
    Private(
        "torch._ops.OpOverload",
        ("_schema",),
        "The arguments that an operation changes.",
    ),
    Private(
        "torch._subclasses.fake_tensor",
        ("FakeTensorMode",),
        "Plans: tensors without values.",
    ),
    Private("torch.UntypedStorage", ("_cdata",), "Tensors that share their memory."),
    Private(
        "torch.autograd.forward_ad",
        ("_current_level",),
        "Calls in forward mode are not split.",
    ),
    Private(
        "torch.distributed.ProcessGroupGloo",
        ("_Options",),
        "Collectives on one network interface.",
    ),
    Private(
        "torch.distributed.ProcessGroupGloo._Options",
        ("_devices", "_timeout"),
        "Collectives on one network interface.",
    ),
    Private(
        "torch.distributed._tools.mem_tracker",
        ("MemTracker",),
        "The memory of a planned step.",
    ),
    Private(
        "torch.distributed._tools.mem_tracker.MemTracker",
        ("_mod_tracker",),
        "It registers no hooks on modules.",
    ),
    Private(
        "torch.distributed.tensor.DTensor",
        ("_local_tensor", "_spec"),
        "Shards and their gradients, without an operation for each.",
    ),
    Private(
        "torch.nn.Module",
        (
            "_backward_hooks",
            "_backward_pre_hooks",
            "_forward_hooks",
            "_forward_pre_hooks",
        ),
        "Calls of layers with hooks are not split.",
    ),
    Private(
        "torch.nn.modules.module",
        ("_has_any_global_hook",),
        "Calls of layers with hooks are not split.",
    ),
    Private(
        "torch.overrides",
        ("_get_current_function_mode_stack",),
        "State of the caller's thread.",
    ),
    Private(
        "torch.utils._python_dispatch",
        ("TorchDispatchMode",),
        "Operations of a layer call.",
    ),
    Private(
        "torch.utils._python_dispatch",
        ("_get_current_dispatch_mode_stack",),
        "State of the caller's thread.",
    ),
)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and their structure, which is hashable."""
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def tree_unflatten(leaves: Any, structure: Any) -> Any:
    """The inverse of `tree_flatten`."""
    return optree.tree_unflatten(structure, leaves)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Containers with a function of their leaves."""
    return optree.tree_map(function, tree, none_is_leaf=True)


#: The number of in-place changes of a tensor: a getter in C, for reads in every step.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")

#: The `__torch_function__` of subclasses whose operations return plain tensors.
disabled_torch_function = torch.nn.Parameter.__torch_function__


def is_graph_retained() -> bool:
    """Whether the backward pass of this thread keeps its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s of this thread, the innermost last."""
    return list(overrides._get_current_function_mode_stack())


def dispatch_modes() -> list[Any]:
    """The `TorchDispatchMode`s of this thread, the innermost last."""
    return list(_python_dispatch._get_current_dispatch_mode_stack())


@contextlib.contextmanager
def pushed_function_mode(mode: Any) -> Iterator[None]:
    """A function mode that has been entered by another thread, in this one."""
    # Not what a subclass does where it is entered.
    overrides.TorchFunctionMode.__enter__(mode)
    try:
        yield
    finally:
        overrides.TorchFunctionMode.__exit__(mode, None, None, None)


@contextlib.contextmanager
def pushed_dispatch_mode(mode: Any) -> Iterator[None]:
    """A dispatch mode that has been entered by another thread, in this one."""
    TorchDispatchMode.__enter__(mode)
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def saved_tensors_hooks_of_thread() -> tuple[Any, Any] | None:
    """The innermost `saved_tensors_hooks` of this thread."""
    found: tuple[Any, Any] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_in_checkpoint() -> bool:
    """Whether this thread is in `torch.utils.checkpoint`, or in its second call.

    Only where it is not reentrant, as it is by default. The hooks are its functions,
    which count the tensors that are saved.
    """
    hooks = saved_tensors_hooks_of_thread()
    if hooks is None:
        return False
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_transformed() -> bool:
    """Whether this thread is in a transform of `torch.func`, or in forward mode."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


#: Returns the dicts of the hooks of a module's calls.
module_hooks = operator.attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)


def has_global_hooks() -> bool:
    """Whether calls of all modules have hooks."""
    return bool(torch.nn.modules.module._has_any_global_hook())


def schema_arguments(operation: Any) -> Sequence[Any]:
    """The arguments of an ATen operation, with `alias_info`."""
    arguments: Sequence[Any] = operation._schema.arguments
    return arguments


def fake_tensor_mode() -> Any:
    """A mode in which operations compute shapes and dtypes, not values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def memory_tracker() -> Any:
    """A mode that tracks the memory of the tensors that operations make."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker: Any = MemTracker()
    tracker._mod_tracker = _NoModules()
    return tracker


class _NoModules(contextlib.nullcontext):  # type: ignore[type-arg]
    """The modules of a memory tracker: none.

    It would register hooks on the parameters of modules, which fails for the seeds of
    Keras's layers, and count their variables, which have no values.
    """

    parents = ()
    is_bw = False

    def register_user_hooks(self, *hooks: Any) -> None:
        """Does nothing."""

    def clear_user_hooks(self) -> None:
        """Does nothing."""


def tracked_bytes(tracker: Any, kind: str) -> int:
    """Bytes that a tracker has found on all devices.

    Args:
        tracker: a `memory_tracker`.
        kind: str, `"current"`, or `"peak"`.
    """
    found = tracker.get_tracker_snapshot(kind)
    # One of the entries of a device is the sum of the others.
    return sum(max(map(int, each.values())) for each in found.values())


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors have in common while they share their memory."""
    return int(tensor.untyped_storage()._cdata)


def local_shard(shards: Any) -> torch.Tensor:
    """What this process has of a `DTensor`, outside of any graph of gradients."""
    own: torch.Tensor = shards._local_tensor
    return own


def spec_of(shards: Any) -> Any:
    """The mesh, placements, shape and dtype of a `DTensor`, hashable."""
    return shards._spec


def shards_like(own: torch.Tensor, like: Any) -> Any:
    """A `DTensor` of which this process has a shard, without a check or a gradient.

    Args:
        own: the shard.
        like: a `DTensor` of the same shape, dtype and placements.
    """
    kind: Any = type(like)
    # Without `__init__`, which does nothing but leave Dynamo.
    return kind.__new__(kind, own, like._spec, requires_grad=False)


def tensor_without_memory(
    cls: type[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """A tensor of a subclass, whose operations are its `__torch_dispatch__`."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def set_timeout(options: Any, timeout: datetime.timedelta) -> None:
    """Sets how long a process group waits for its peers."""
    options._timeout = timeout


def gloo_device(host: str) -> Any:
    """A listener of Gloo on one network interface of the machine."""
    with scheduled_as_batch():
        return dist.ProcessGroupGloo.create_device(hostname=host)


def create_gloo_group(
    store: Any, index: int, count: int, timeout: datetime.timedelta, device: Any
) -> Any:
    """A Gloo process group, connected by a `gloo_device` of each worker."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    set_timeout(options, timeout)
    with scheduled_as_batch():
        options._devices = [device]
        return dist.ProcessGroupGloo(store, index, count, options)


def all_gather_into(group: Any, joined: torch.Tensor, own: torch.Tensor) -> Any:
    """Begins to gather equal parts in one tensor; a list of parts is copied by NCCL."""
    return group._allgather_base(joined, own)


def reduce_scatter_into(group: Any, own: torch.Tensor, parts: torch.Tensor) -> Any:
    """Begins to sum equal parts over processes, each of which gets its own."""
    return group._reduce_scatter_base(own, parts)


def compile_graph(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles a graph of ATen operations by TorchInductor, in this process."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(graph, inputs, config_patches=_IN_THIS_PROCESS)
    return cast(Callable[..., Any], compiled)


def without_donated_buffers() -> contextlib.AbstractContextManager[None]:
    """A context in which a backward program keeps what the forward one has saved.

    Entered to compile it, and where its graph is retained for a second backward pass.
    """
    from torch._functorch import config

    found: contextlib.AbstractContextManager[None] = config.patch(donated_buffer=False)
    return found


class _Function(torch.nn.Module):
    """A function of tensors, for a compiler that takes modules."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def compile_call(
    function: Callable[..., Any],
    like: Sequence[torch.Tensor],
    prepare: Callable[[Any], None],
) -> Callable[..., Any]:
    """Compiles a function and its gradient, by AOTAutograd and TorchInductor.

    Python of the function runs on tensors without values, more than once. Sizes are
    constants of the programs.

    Args:
        function: from tensors to a tuple of tensors.
        like: the arguments, whose values are not read.
        prepare: called with each `torch.fx.Graph` before it is lowered.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Shapes(FakeTensorMode):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            with unrecorded():  # Torch computes shapes by operations of its own.
                return super().__torch_dispatch__(*args, **kwargs)

    # The compiler's cache leaves out programs without a `ShapeEnv`.
    with Shapes(shape_env=ShapeEnv(), static_shapes=True):
        fakes = [
            torch.empty_strided(
                *(each.shape, each.stride()),
                dtype=each.dtype,
                device=each.device,
                requires_grad=each.requires_grad,
            )
            for each in like
        ]

    def lowered(module: Any, inputs: Any, **options: Any) -> Any:
        prepare(module.graph)
        module.recompile()
        return compile_fx_inner(module, inputs, **options)

    module = _Function(function)
    with (
        functorch_config.patch(
            enable_autograd_cache=False,
            force_non_lazy_backward_lowering=True,
        ),
        without_donated_buffers(),
    ):
        compiled: Any = compile_fx(
            cast(Any, module),
            fakes,
            inner_compile=lowered,
            config_patches=_IN_THIS_PROCESS,
        )
    # What is compiled refers to the module, and the function to the layer.
    del module.function
    return compiled


@contextlib.contextmanager
def computed_again() -> Iterator[None]:
    """A context of a trace; the backward program computes again what is traced in it.

    What one context takes from another is kept.
    """
    from torch.fx import traceback

    with traceback.preserve_node_meta():
        traceback.get_current_meta().update(
            recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=next(_numbers)
        )
        yield


def module_copy(module: torch.nn.Module, values: dict[int, Any], device: Any) -> Any:
    """A module with other tensors in place of its parameters.

    Args:
        module: the module, which is not changed.
        values: the tensors, by the `id` of parameters.
        device: torch.device, that of the copies of its buffers.
    """
    copies: dict[int, Any] = {}
    for each in module.modules():
        copies[id(each)] = each._replicate_for_data_parallel()
    for each in module.modules():
        copy = copies[id(each)]
        for name, parameter in each.named_parameters(recurse=False):
            setattr(copy, name, values[id(parameter)])
        for name, buffer in each.named_buffers(recurse=False):
            setattr(copy, name, buffer.to(device, copy=True))
        for name, child in each.named_children():
            setattr(copy, name, copies[id(child)])
    return copies[id(module)]


def changed_buffers(copy: torch.nn.Module) -> list[str]:
    """The names of buffers of a `module_copy`, new tensors, that a call has changed."""
    return [name for name, buffer in copy.named_buffers() if buffer._version]
