"""The rules of operations, by their names in ATen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keras_strategies.engines.torch.row_proofs.recorded_operation import Operation
from keras_strategies.engines.torch.row_proofs.value_placements import Placed

#: Placements of the results of an operation; one for all of them.
RuleFunction = Callable[[Operation], Placed | Sequence[Placed]]


@dataclass(frozen=True)
class OperationRule:
    """The rule of an operation.

    Args:
        apply: returns the placements of the results.
        sizes: the arguments that may depend on the number of rows.
    """

    apply: RuleFunction
    sizes: frozenset[str]


_rules: dict[str, OperationRule] = {}


def rule(
    names: str, sizes: Sequence[str] = ()
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers a rule.

    Args:
        names: str, names of operations, without those of overloads.
        sizes: the arguments that may depend on the number of rows.
    """

    def register(apply: RuleFunction) -> RuleFunction:
        for name in names.split():
            if name in _rules:
                raise ValueError(f"{name} has two rules.")
            _rules[name] = OperationRule(apply, frozenset(sizes))
        return apply

    return register


def find_rule(name: str) -> OperationRule | None:
    """The rule of an operation, by its name."""
    return _rules.get(name)


def has_rule(operation: Any) -> bool:
    """Whether an ATen operation needs no decomposition."""
    name: str = operation.overloadpacket.__name__
    return (
        name in _rules
        or name.rstrip("_") in _rules
        or torch.Tag.pointwise in operation.tags
        or torch.Tag.nondeterministic_seeded in operation.tags
    )
