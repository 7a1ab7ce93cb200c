"""Updates of a dynamic loss scale on the server that stores it.

A worker pulls the scale with its variables and divides the gradients by it before they
are pushed to the inner optimizer; gradients with a non-finite value are not pushed. In
both cases it sends a `ScaleReport` under the name of the update, so that each report is
applied once, to the one server that workers pull the scale from. The copies on the
other servers are not read.
"""

from __future__ import annotations

import numpy as np

from keras_strategies.parameter_server.server.variable_store import VariableStore
from keras_strategies.parameter_server.wire.step_messages import ScaleReport


def apply_scale_report(store: VariableStore, report: ScaleReport) -> None:
    """Updates scale and counter as `LossScaleOptimizer.apply` does.

    A report counts only if its scale is the current one. If several workers overflow at
    one scale, the scale is halved once.
    """
    scale, counter = store.get(report.scale), store.get(report.counter)
    if scale != report.used:
        return
    after = counter + 1
    if not report.is_finite:
        after, scale = counter * 0, scale * np.float32(0.5)
    elif after == report.growth_steps:
        after, scale = counter * 0, scale * np.float32(2)
    store.write(report.scale, np.asarray(scale))
    store.write(report.counter, np.asarray(after))
