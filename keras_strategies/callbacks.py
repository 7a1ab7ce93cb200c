"""Callbacks for `fit`.

>>> model.fit(x, y, epochs=20, callbacks=[ks.callbacks.Resume("runs/1")])
"""

from keras_strategies.training.resume.resume_callback import Resume

__all__ = ["Resume"]


def __dir__() -> list[str]:
    return __all__
