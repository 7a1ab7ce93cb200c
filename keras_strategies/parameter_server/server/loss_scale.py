"""Dynamic loss scales: a worker judges its step, one server keeps the scale.

A worker pulls the scale with its variables, and has all gradients of its step. It
divides them by the scale that it pulled, and pushes them for the inner optimizer; of a
step with a gradient that is not finite it pushes none. Either way it *reports* what it
found, under the name of the update, so that each report counts once. The server that
workers pull the scale from then follows Keras's rule. The others' copies, which are as
they were last written, are never read.
"""

from __future__ import annotations

import numpy as np

from keras_strategies.parameter_server.server.variable_store import VariableStore
from keras_strategies.parameter_server.wire.step_messages import ScaleReport


def apply_scale_report(store: VariableStore, report: ScaleReport) -> None:
    """Changes scale and counter as `LossScaleOptimizer.apply` does.

    Several workers may have computed with a scale that one of them has had changed
    since: what they report says nothing about the present one, and changes nothing.
    So a scale that is too large for several is halved once.
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
