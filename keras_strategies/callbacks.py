"""Callbacks for `fit`.

>>> model.fit(x, y, epochs=20, callbacks=[ks.callbacks.Resume("runs/1")])
"""

from keras_strategies.training.id_admission import AdmitIds
from keras_strategies.training.resume.resume_callback import Resume
from keras_strategies.verification.verify_callback import Verify

__all__ = ["AdmitIds", "Resume", "Verify"]


def __dir__() -> list[str]:
    return __all__
