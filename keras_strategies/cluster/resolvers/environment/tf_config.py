"""The environment variable `TF_CONFIG` of TensorFlow.

TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]},
            "task": {"type": "worker", "index": 0}}'
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError

VARIABLE = "TF_CONFIG"


class TFConfigClusterResolver(FixedClusterResolver):
    """Reads the environment variable `TF_CONFIG`; arguments take precedence.

    Args:
        task_type: str, the job of this process instead of `task.type`.
        task_id: int, its number instead of `task.index`.
        rpc_layer: str, instead of `rpc_layer`.
        environment: str, instead of `environment`.

    Raises:
        ValueError: if the variable is not JSON, does not describe a cluster, or this
            process is not one of its tasks; the message shows its text.

    Example:

    >>> resolver = ks.cluster_resolver.TFConfigClusterResolver()
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ):
        self._text = os.environ.get(VARIABLE, "")
        config = self._read()
        task = config.get("task") or {}
        self._expect(
            isinstance(task, Mapping), '"task" must be a dict with "type" and "index"'
        )
        index = task.get("index") if task_id is None else task_id
        self._expect(
            index is None or str(index).isdigit(), '"index" of "task" must be a number'
        )
        super().__init__(
            task.get("type") if task_type is None else task_type,
            None if index is None else int(index),
            config.get("rpc_layer") if rpc_layer is None else rpc_layer,
        )
        self._environment = (
            config.get("environment", "") if environment is None else environment
        )
        try:
            self._spec = ClusterSpec(config.get("cluster") or {})
            self.check_task()
        except ClusterError as error:
            raise ClusterError(f"{error.text} {self._shown()}") from None

    def _read(self) -> dict[str, Any]:
        if not self._text.strip():
            return {}
        try:
            config = json.loads(self._text)
        except ValueError as error:
            raise ClusterError(
                f"The environment variable {VARIABLE} is not JSON: {error}. "
                f"{self._shown()}"
            ) from None
        self._expect(isinstance(config, dict), "it must be a JSON object")
        found: dict[str, Any] = config
        return found

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise ClusterError(
                f"The environment variable {VARIABLE} is malformed: {what}. "
                f"{self._shown()}"
            )

    def _shown(self) -> str:
        return f"{VARIABLE} is {self._text!r}."
