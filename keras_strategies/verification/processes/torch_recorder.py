"""Records of a Torch training: calls of modules, losses, gradients, parameters.

Torch calls hooks for all modules and all optimizers, so a script needs no change, under
DDP, FSDP2, Accelerate and Lightning Fabric too. Dropout passes its inputs unchanged:
its masks depend on processes, and so would everything after them. They are drawn, and
compared between processes.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from keras_strategies.verification.processes.records import (
    Call,
    Recorder,
    row_checksums,
)

#: Functions of `torch.nn.functional` with `p` and `training` as second and third.
_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)
#: Parts of names that wrappers add.
_WRAPPERS = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module")


class TorchRecorder(Recorder):
    """Records a training of this process.

    Args:
        steps: int, as for `Recorder`.
        scale: int, by which batches of loaders are multiplied.
        disturbance: float, by which weights are changed before the first step.
    """

    def __init__(self, steps: int, scale: int = 1, disturbance: float = 0.0):
        super().__init__(steps)
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._torch, self._disturbance = torch, disturbance
        self.record.versions = {"torch": str(torch.__version__)}
        # Modules that are called, with the state of the generator before.
        self._open: list[tuple[Any, bytes, int]] = []
        self._call = Call()
        self._models: list[Any] = []
        self._drawn = 0
        self._scaled: set[int | None] = set()
        modules = torch.nn.modules.module
        for handle in (
            modules.register_module_forward_pre_hook(self._before_call),
            modules.register_module_forward_hook(
                self._after_call, with_kwargs=True, always_call=True
            ),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self.stops.append(handle.remove)
        functional = torch.nn.functional
        for name in _DROPOUTS:
            self.replace(functional, name, self._dropout)
        self.replace(functional, "scaled_dot_product_attention", self._attention)
        self.replace(torch.autograd, "backward", self._backward)
        self.replace(torch, "save", self._save)
        if scale > 1:
            loader = functools.partial(self._loader, scale)
            self.replace(torch.utils.data.DataLoader, "__init__", loader)

    def array(self, value: Any) -> np.ndarray:
        """A copy of a tensor; of a sharded one, joined from all processes."""
        if not isinstance(value, self._torch.Tensor):
            return np.array(value)
        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if value.dtype in (self._torch.bfloat16, self._torch.float16):
            value = value.float()
        return np.array(value.cpu().numpy(), copy=True)

    # Calls of modules.

    def _before_call(self, module: Any, args: Any) -> None:
        if not self._open and self._is_step():
            self._call = Call()
            if _has_parameters(module):
                self.step_begins()
            if module not in self._models and _has_parameters(module):
                self._models.append(module)
                self._begins(module)
        self._open.append((module, self._random_state(), self._drawn))

    def _after_call(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        while self._open and self._open[-1][0] is not module:  # Those that raised.
            self._open.pop()
        if not self._open:
            return
        _, state, drawn = self._open.pop()
        inputs = _tensors(self._torch, (args, kwargs))
        outermost = self._open[0][0] if self._open else module
        if not _has_parameters(outermost) and self._models:
            return  # A loss or a metric.
        name = self._name(outermost, module)
        if state != self._random_state() and drawn == self._drawn:
            self._drawn += 1
            self.record.random[name] = True
        if not self._is_step():
            if not self._open:
                self.record.evaluated += self._rows(inputs)
            return
        call = self._call
        count = sum(_base(each) == name for each in call.outputs)
        name = name if not count else f"{name} call {count + 1}"
        for i, each in enumerate(_tensors(self._torch, output)):
            if each.ndim:
                call.outputs[name if not i else f"{name}[{i}]"] = self.array(each)
        if not self._open:
            call.rows = self._rows(inputs)
            count = len(call.rows)
            call.outputs = {n: o for n, o in call.outputs.items() if len(o) == count}
            self.current.calls.append(call)

    def _rows(self, inputs: list[Any]) -> list[int]:
        return row_checksums([self.array(each) for each in inputs])

    def _is_step(self) -> bool:
        return bool(self._torch.is_grad_enabled())

    def _random_state(self) -> bytes:
        return bytes(self._torch.get_rng_state().numpy().tobytes())

    def _name(self, outermost: Any, module: Any) -> str:
        for name, each in outermost.named_modules():
            if each is module:
                return _own_name(name) or "model"
        return type(module).__name__

    def _begins(self, model: Any) -> None:
        """Records the weights before the first step; disturbs them if it has to."""
        if self._disturbance:
            generator = np.random.default_rng(0)
            with self._torch.no_grad():
                for parameter in model.parameters():
                    sharded = hasattr(parameter, "to_local")
                    each = parameter.to_local() if sharded else parameter
                    signs = generator.choice([-1.0, 1.0], tuple(each.shape))
                    factor = self._torch.as_tensor(1 + self._disturbance * signs)
                    each.mul_(factor.to(each.dtype))
        self.record.start.update(self._variables([model]))

    def variables_of(self, model: Any) -> dict[str, np.ndarray]:
        if model not in self._models:
            self._models.append(model)
        return self._variables([model])

    def _variables(self, models: list[Any]) -> dict[str, np.ndarray]:
        found = {}
        for name, each in self._named(models, buffers=True):
            self.record.sharded |= hasattr(each, "full_tensor")
            found[name] = self.array(each)
        return found

    def _named(self, models: list[Any], buffers: bool) -> list[tuple[str, Any]]:
        found: dict[int, tuple[str, Any]] = {}
        for model in models:
            number = self._models.index(model)
            prefix = f"model {number + 1}: " if number else ""
            own = [*model.named_parameters()]
            own += model.named_buffers() if buffers else []
            for name, each in own:
                found.setdefault(id(each), (prefix + _own_name(name), each))
        return list(found.values())

    # Losses and updates.

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors)
        self.step_begins()
        if len(roots) == 1 and roots[0].numel() == 1:
            self.current.losses.append(float(self.array(roots[0])))
        return original(tensors, *args, **kwargs)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        names = {id(each): name for name, each in self._named(self._models, False)}
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    name = key if not i else f"{key} of group {i}"
                    self.current.settings[name] = float(value)
            for j, each in enumerate(group["params"]):
                name = names.get(id(each), f"parameter {j} of group {i}")
                if each.grad is not None:
                    self.current.gradients[name] = self.array(each.grad)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.current.variables = self._variables(self._models)
        self.step_ended()

    # Dropout, files, loaders.

    def _dropout(
        self,
        original: Any,
        input: Any,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        if training and p and self._is_step():
            devices = [input.device] if input.is_cuda else []
            with self._torch.random.fork_rng(devices), self._torch.no_grad():
                ones = original(self._torch.ones_like(input), p, True)
            checked = zlib.crc32((ones > 0).cpu().numpy().tobytes())
            # Few units may be the same by chance.
            self.record.masks.append(checked if input.numel() >= 32 else 0)
        return input

    def _attention(
        self,
        original: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if dropout_p:  # The one that is recorded.
            self._torch.nn.functional.dropout(query, dropout_p)
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def _save(self, original: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        for path, each in _leaves(self._torch, obj, ""):
            value = each.to_local() if hasattr(each, "to_local") else each
            self.record.saved[path] = self.array(value)
        return original(obj, *args, **kwargs)

    def _loader(
        self,
        scale: int,
        original: Any,
        loader: Any,
        dataset: Any,
        batch_size: int | None = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Frameworks make a loader again from the settings of the script's.
        is_scaled = batch_size in self._scaled
        if batch_size and not is_scaled and kwargs.get("batch_sampler") is None:
            batch_size *= scale
            self._scaled.add(batch_size)
        original(loader, dataset, batch_size, *args, **kwargs)


def _base(name: str) -> str:
    return name.partition(" call ")[0].partition("[")[0]


def _own_name(name: str) -> str:
    return ".".join(each for each in name.split(".") if each not in _WRAPPERS)


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def _tensors(torch: Any, value: Any) -> list[Any]:
    return [each for _, each in _leaves(torch, value, "")]


def _leaves(torch: Any, value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        pairs = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(str(i), each) for i, each in enumerate(value)]
    else:
        return []
    return [
        leaf
        for key, each in pairs
        for leaf in _leaves(torch, each, f"{path}.{key}".lstrip("."))
    ]
