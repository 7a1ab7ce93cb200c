"""Environment variables of Amazon SageMaker's training jobs.

SM_HOSTS='["algo-1", "algo-2"]' SM_CURRENT_HOST=algo-2
"""

from __future__ import annotations

import json
import os

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError

HOSTS = "SM_HOSTS"
CURRENT_HOST = "SM_CURRENT_HOST"
NUM_GPUS = "SM_NUM_GPUS"


class SageMakerClusterResolver(FixedClusterResolver):
    """Reads SageMaker's variables: each host is a worker.

    Args:
        port: int, the port of every worker.
        task_type: str, the job of this process instead of `"worker"`.
        task_id: int, its number instead of the host's place among the sorted hosts.
        rpc_layer: str, the protocol for `master()`.
        environment: str, instead of `"sagemaker"`.

    Raises:
        ValueError: if a variable is missing or invalid.

    Example:

    >>> resolver = ks.cluster_resolver.SageMakerClusterResolver()
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ):
        missing = [name for name in (HOSTS, CURRENT_HOST) if not os.environ.get(name)]
        if missing:
            raise ClusterError(
                f"The environment variables {missing} are not set; SageMaker sets "
                "them on each host of a training job. Run the script in such a job, or "
                "use another resolver."
            )
        text, current = os.environ[HOSTS], os.environ[CURRENT_HOST]
        try:
            hosts = json.loads(text)
        except ValueError:
            hosts = None
        if not isinstance(hosts, list) or not all(isinstance(h, str) for h in hosts):
            raise ClusterError(
                f"The environment variable {HOSTS} must be a JSON list of names, such "
                f'as ["algo-1", "algo-2"]. Found: {text!r}.'
            )
        # The order must be the same on every host.
        hosts = sorted(hosts)
        if current not in hosts:
            raise ClusterError(
                f"{CURRENT_HOST} is {current!r}, which is not among {HOSTS}: {hosts}. "
                "Correct one of the variables."
            )
        self._spec = ClusterSpec({"worker": [f"{host}:{port}" for host in hosts]})
        super().__init__(
            "worker" if task_type is None else task_type,
            hosts.index(current) if task_id is None else task_id,
            rpc_layer,
        )
        self._environment = "sagemaker" if environment is None else environment
        count = os.environ.get(NUM_GPUS, "")
        self._accelerators = {"GPU": int(count)} if count.isdigit() else {}
        self.check_task()
