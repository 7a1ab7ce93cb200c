"""Recorded graphs of ATen operations, for functions of tensors on Torch.

For small batches, calling Keras's layers takes several times as long as their
computation. `torch.fx.experimental.proxy_tensor.make_fx` records the operations of a
function below autograd, so that the graph of a step contains the backward pass; the
graph is run for inputs of the same shapes.

It is recorded with fake tensors. Python code that depends on their values, or on a
tensor that is not an input, raises, and the function then runs eagerly: a graph
contains no values of the batch that it was recorded with. It may contain Python state;
therefore only Keras's own code is recorded, unless the user requests it.

TorchInductor can *fuse* a graph: it compiles elementwise operations into one loop. This
needs a C++ compiler and several seconds, and pays off for graphs on arrays larger than
a cache.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_strategies.engines.torch.compat import (
    compile_graph,
    tree_flatten,
    tree_unflatten,
)

#: Takes tensors; returns a structure of tensors and constants, and any other result.
Function = Callable[..., tuple[Any, Any]]

_logger = logging.getLogger(__name__)

#: Maximum number of graphs; further shapes run eagerly.
_MOST_GRAPHS = 32
#: Operations that do not change the value of an integer.
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
#: Bytes of inputs above which graphs are fused, and the number of calls before.
_FUSED_BYTES = 1 << 20
_FUSED_CALLS = 3


class NotRecordableError(Exception):
    """A function depends on more than the shapes of its inputs."""


class NotFusableError(Exception):
    """No C++ compiler was found, or it cannot compile a graph."""


class TensorGraph:
    """The recorded operations of a function on tensors of some shapes.

    Args:
        function: takes tensors; returns a structure of tensors and constants, and any
            other result.
        inputs: tensors of these shapes; their values are not used.

    Attributes:
        note: the other result of the function.

    Raises:
        Exception: `NotRecordableError` if more than shapes matters.
    """

    def __init__(self, function: Function, inputs: Sequence[torch.Tensor]) -> None:
        def flat(*tensors: torch.Tensor) -> list[Any]:
            result, self.note = function(*tensors)
            leaves, self._structure = tree_flatten(result)
            return leaves

        try:
            self._module = make_fx(flat, tracing_mode="fake")(*inputs)
        except Exception as error:  # Any error of code that uses values.
            raise NotRecordableError(str(error)) from error
        self._run: Callable[..., Any] = self._module.forward
        self.is_fused = False
        #: Number of calls.
        self.calls = 0

    def __call__(
        self,
        *inputs: torch.Tensor,
        convert: Callable[[Any], Any] = lambda leaf: leaf,
    ) -> Any:
        """Runs the operations on other tensors of these shapes and dtypes.

        Args:
            inputs: the tensors.
            convert: converts each leaf of the result.
        """
        with torch.no_grad():
            leaves = [convert(leaf) for leaf in self._run(*inputs)]
        return tree_unflatten(leaves, self._structure)

    def fuse(self, inputs: Sequence[torch.Tensor]) -> None:
        """Compiles the graph by TorchInductor.

        Args:
            inputs: tensors of its shapes; they are not changed.

        Raises:
            Exception: `NotFusableError` if it cannot.
        """
        try:
            # It may change the graph before it fails.
            self._run = compile_graph(copy.deepcopy(self._module), list(inputs))
        except Exception as error:  # No compiler, or an unsupported operation.
            raise NotFusableError(str(error).partition("\n")[0]) from error
        self.is_fused = True

    def input_index(self, output: int) -> int | None:
        """The index of the integer input that an output equals; None for others."""
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
    """Recorded graphs of a function, by shapes.

    Args:
        function: as for `TensorGraph`.
        check: called with each new graph; raises `NotRecordableError` to reject it.
        is_requested: bool, whether to warn if it cannot be recorded.
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
        """The graph for inputs of these shapes, from their second call on.

        Many shapes occur once, and recording takes as long as several calls.

        Returns:
            A graph; None if the function must run eagerly.
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
