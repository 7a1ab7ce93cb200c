"""Names of `tf.distribute.experimental`, so that a script only swaps the module."""

from keras_strategies.experimental import coordinator, partitioners
from keras_strategies.experimental.strategies import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from keras_strategies.experimental.strategies import (
    ExperimentalTPUStrategy as TPUStrategy,
)
from keras_strategies.parameter_server.parameter_server_strategy import (
    ParameterServerStrategy,
)
from keras_strategies.strategies.base.strategy_input import ValueContext
from keras_strategies.strategies.central_storage import CentralStorageStrategy
from keras_strategies.training.saving.preemption import (
    PreemptionCheckpointHandler,
    TerminationConfig,
)
from keras_strategies.types import (
    CommunicationImplementation,
    CommunicationOptions,
)

CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]


def __dir__() -> list[str]:
    return __all__
