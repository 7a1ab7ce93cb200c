"""Functions of tensors as graphs of ATen's operations: recorded once, then run again.

Keras's layers on Torch take several times as long to call as what they compute takes,
where batches are small. What a function does to tensors is recorded by
`torch.fx.experimental.proxy_tensor.make_fx`, below autograd, so that a step's graph has
the backward pass in it, and is run again for inputs of the same shapes.

It is recorded with tensors that have no numbers. What would depend on numbers, or on a
tensor that is no input, is an error then, and the function is called as it is from then
on: nothing can be left in a graph from the batch that it was recorded with. State of
Python's is another matter, which is why only code of Keras's is recorded unless asked.

A graph can be *fused*: TorchInductor makes one loop of operations that each go through
the same memory. That takes a C++ compiler and several seconds, so it is for what is run
again and again on arrays larger than a cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

#: Takes tensors; returns a structure of tensors and constants, and a note.
Function = Callable[..., tuple[Any, Any]]

_logger = logging.getLogger(__name__)

#: Kinds of inputs for which graphs are kept; others call the function as it is.
_MOST_GRAPHS = 32
#: Operations that hand on an integer as it is.
_SAME_INTEGERS = frozenset(
    (
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.lift_fresh_copy.default,
        torch.ops.aten._to_copy.default,
    )
)
_WIDE = (torch.int32, torch.int64)
#: Bytes of inputs from which on fusing pays, and calls after which it is done.
_FUSED_BYTES = 1 << 20
_FUSED_CALLS = 3


class NotRecordableError(Exception):
    """A function does what depends on more than the shapes of its inputs."""


class NotFusableError(Exception):
    """There is no C++ compiler, or it cannot compile a graph."""


class TensorGraph:
    """What a function did to tensors of some shapes.

    Args:
        function: takes tensors, returns a structure of tensors and constants, and a
            note of anything else.
        inputs: tensors of the shapes to record for. Their numbers do not matter, and
            they stay as they are.

    Attributes:
        note: what the function noted.

    Raises:
        Exception: `NotRecordableError` if more than shapes matters.
    """

    def __init__(self, function: Function, inputs: Sequence[torch.Tensor]) -> None:
        def flat(*tensors: torch.Tensor) -> list[Any]:
            result, self.note = function(*tensors)
            leaves, self._structure = pytree.tree_flatten(result)
            return leaves

        try:
            self._module = make_fx(flat, tracing_mode="fake")(*inputs)
        except Exception as error:  # Whatever the function meets without numbers.
            raise NotRecordableError(str(error)) from error
        self._run: Callable[..., Any] = self._module.forward
        self.is_fused = False
        #: How often it has been asked for.
        self.calls = 0

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Does the same to other tensors of these shapes and dtypes."""
        with torch.no_grad():
            return pytree.tree_unflatten(self._run(*inputs), self._structure)

    def fuse(self, inputs: Sequence[torch.Tensor]) -> None:
        """Lets TorchInductor compile this graph.

        Args:
            inputs: tensors of its shapes, which stay as they are.

        Raises:
            Exception: `NotFusableError` if it cannot.
        """
        try:
            from torch._inductor import compile, config

            # Others would compile in a pool of processes that stay.
            config.compile_threads = 1
            # It may change the graph, and fail later.
            self._run = compile(copy.deepcopy(self._module), list(inputs))
        except Exception as error:  # No compiler, or what it does not know.
            raise NotFusableError(str(error).partition("\n")[0]) from error
        self.is_fused = True

    def input_index(self, output: int) -> int | None:
        """Which input a leaf of the output is, an integer that nothing has changed."""
        nodes = list(self._module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        node = nodes[-1].args[0][output]
        while isinstance(node, torch.fx.Node):
            if node.meta["val"].dtype not in _WIDE:
                return None
            if node in inputs:
                return inputs.index(node)
            if node.target not in _SAME_INTEGERS:
                return None
            node = node.args[0]
        return None


class GraphRecorder:
    """Keeps a function's graphs.

    Args:
        function: as that of a `TensorGraph`.
        check: called with each new graph; raises `NotRecordableError` if it will not
            do.
        is_asked_for: bool, whether somebody is to be told where there is none.
        fuses: bool, whether graphs on large arrays are fused.
    """

    def __init__(
        self,
        function: Function,
        check: Callable[[TensorGraph], None] = lambda graph: None,
        is_requested: bool = False,
        fuses: bool = False,
    ):
        self._function = function
        self._check = check
        self._level = logging.WARNING if is_requested else logging.INFO
        self._graphs: dict[Any, TensorGraph | None] = {}
        self._is_recordable = True
        self._fuses = fuses

    def graph(self, inputs: Sequence[torch.Tensor]) -> TensorGraph | None:
        """The graph for inputs of these shapes, from the second time on.

        Many shapes come once, and recording takes as long as several calls.

        Returns:
            A graph, or None where the function is to be called as it is.
        """
        if not self._is_recordable:
            return None
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in self._graphs:
            if len(self._graphs) < _MOST_GRAPHS:
                self._graphs[key] = None
            return None
        if self._graphs[key] is None:
            try:
                graph = TensorGraph(self._function, inputs)
                self._check(graph)
            except NotRecordableError as error:
                _logger.log(self._level, "Run eagerly, not as a graph: %s", error)
                self._is_recordable = False
                return None
            self._graphs[key] = graph
        found = self._graphs[key]
        assert found is not None
        found.calls += 1
        if self._fuses and found.calls == _FUSED_CALLS:
            self._fuse(found, inputs)
        return found

    def _fuse(self, graph: TensorGraph, inputs: Sequence[torch.Tensor]) -> None:
        if sum(tensor.nbytes for tensor in inputs) < _FUSED_BYTES:
            return
        try:
            graph.fuse(inputs)
        except NotFusableError as error:
            _logger.info("Run operation by operation, not fused: %s", error)
            self._fuses = False
