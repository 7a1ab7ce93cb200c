"""Records the ATen operations of a call into a `torch.fx` graph.

Operations are recorded below autograd, while the call runs: its results are used, and
each operation has the same gradient when the graph is run. A graph would be wrong for
other values of its inputs if one of these was used other than by operations, so such a
call is rejected: values that become Python numbers, shapes that depend on values,
random numbers, tensors from elsewhere, in-place changes of inputs, and code with
gradients of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from keras_strategies.engines.torch.compat import (
    TorchDispatchMode,
    schema_arguments,
    tree_map,
    version_of,
)

#: Maximum number of operations of a graph, which is one Python function.
_MOST_OPERATIONS = 3000
# Functions that read the values of tensors without an operation.
_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
)
# Operation on a tensor that was made of Python or NumPy values.
_CONSTANT = torch.ops.aten.lift_fresh.default
_UNUSABLE_TAGS = frozenset(
    (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
)


class OperationRecorder:
    """Records a call: enter, make the call, and call `graph`.

    Args:
        inputs: the tensors that the call depends on.

    Attributes:
        problem: str, why the call cannot be a graph; empty if it can.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        self.problem = ""
        self._graph = fx.Graph()
        self._root = torch.nn.Module()
        # By tensor; without references, which would need the memory of all of them.
        self._nodes: MutableMapping[torch.Tensor, fx.Node] = WeakTensorKeyDictionary()
        self._count = 0
        self._grad = torch.is_grad_enabled()
        # Inputs and constants, and their versions, which operations must not change.
        self._sources: list[tuple[torch.Tensor, int]] = []
        for i, tensor in enumerate(inputs):
            if tensor in self._nodes:
                self.reject("two inputs are one tensor")
            self._add_source(tensor, self._graph.placeholder(f"input_{i}"))
        self._functions = _Functions(self)
        self._operations = _Operations(self)

    def __enter__(self) -> OperationRecorder:
        self._functions.__enter__()
        self._operations.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._operations.__exit__(*error)
        self._functions.__exit__(*error)

    def graph(self, outputs: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
        """The recorded operations as a function of inputs; None after a problem.

        Args:
            outputs: the tensors that the function returns, in a tuple.
        """
        if any(version_of(tensor) != version for tensor, version in self._sources):
            self.reject("an input was changed in place")
        if self.problem:
            return None
        found = [self._nodes.get(output) for output in outputs]
        if None in found:
            self.reject("an output was made outside of the call")
            return None
        self._graph.output(tuple(found))
        self._graph.eliminate_dead_code()
        function: Callable[..., Any] = fx.GraphModule(self._root, self._graph).forward
        return function

    def reject(self, problem: str) -> None:
        """Notes why the call cannot be a graph."""
        self.problem = self.problem or problem

    def add_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Adds an operation that has just run."""
        self._count += 1
        if self._count > _MOST_OPERATIONS:
            self.reject(f"it has more than {_MOST_OPERATIONS} operations")
        if torch.is_grad_enabled() != self._grad:
            self.reject("it switches gradients on or off, or defines a gradient")
        if _UNUSABLE_TAGS & set(func.tags):
            self.reject(f"{func} depends on values")
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(
            func, args, kwargs
        ):
            self.reject(f"{func} draws random numbers")
        if func is _CONSTANT:
            self._add_constant(args[0])
        if not self.problem:
            self._add_results(func, args, kwargs, result)

    def _add_results(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        args, kwargs = tree_map(self._node, (args, kwargs))
        if self.problem:
            return
        node = self._graph.call_function(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                if isinstance(part, torch.Tensor):
                    item = self._graph.call_function(operator.getitem, (node, i))
                    self._nodes[part] = item
        elif result is not None:
            self.reject(f"{func} returns a Python value")

    def _node(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, torch.Generator):
                self.reject("it draws random numbers")
            return leaf
        node = self._nodes.get(leaf)
        if node is None:
            self.reject("it uses a tensor that was made outside of the call")
        return node

    def _add_constant(self, tensor: torch.Tensor) -> None:
        if tensor not in self._nodes:
            name = f"constant_{len(self._sources)}"
            self._root.register_buffer(name, tensor)
            self._add_source(tensor, self._graph.get_attr(name))

    def _add_source(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._sources.append((tensor, version_of(tensor)))
        self._nodes[tensor] = node


class _Operations(TorchDispatchMode):
    def __init__(self, recorder: OperationRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._recorder.add_operation(func, args, kwargs, result)
        return result


class _Functions(TorchFunctionMode):
    """Finds what the dispatcher does not see: reads of values."""

    def __init__(self, recorder: OperationRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _READS:
            self._recorder.reject("it reads the values of a tensor")
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws; attention does not without dropout."""
    for argument, value in zip(schema_arguments(func), args, strict=False):
        if argument.name == "dropout_p":
            return bool(value)
    names = [argument.name for argument in schema_arguments(func)]
    return bool(kwargs.get("dropout_p")) or "dropout_p" not in names
