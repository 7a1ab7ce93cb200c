"""Pods of a Kubernetes cluster, found by their labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError


class KubernetesClusterResolver(ClusterResolver):
    """Asks the API server for the pods of each job.

    Args:
        job_to_label_mapping: dict from job to label selectors; the pods of all
            selectors of a job are its tasks, ordered by name. None for
            `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: int, the port of every pod.
        rpc_layer: str, the protocol for `master()`.
        override_client: a `kubernetes.client.CoreV1Api`; None to make one from the
            configuration in a pod, or from the user's.
        namespace: str or None for all namespaces.
        task_type: str, the job of this process.
        task_id: int, its number within the job.

    Raises:
        ImportError: without the package `kubernetes` and without a client.
        ValueError: from `cluster_spec()`, if a pod is not running.

    Example:

    >>> resolver = ks.cluster_resolver.KubernetesClusterResolver(
    ...     {"worker": ["app=trainer"]}, task_type="worker", task_id=0)
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        namespace: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        self._selectors = dict(
            job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        )
        self._port = tf_server_port
        self._namespace = namespace
        self._client = override_client if override_client is not None else _client()

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(
            {
                job: [
                    f"{pod.status.pod_ip}:{self._port}"
                    for selector in selectors
                    for pod in self._pods(job, selector)
                ]
                for job, selectors in self._selectors.items()
            }
        )

    def _pods(self, job: str, selector: str) -> list[Any]:
        if self._namespace is None:
            found = self._client.list_pod_for_all_namespaces(label_selector=selector)
        else:
            found = self._client.list_namespaced_pod(
                self._namespace, label_selector=selector
            )
        pods = sorted(found.items, key=lambda pod: str(pod.metadata.name))
        for pod in pods:
            if pod.status.phase != "Running" or not pod.status.pod_ip:
                raise ClusterError(
                    f"Pod {pod.metadata.name!r} of job {job!r} ({selector}) is "
                    f"{pod.status.phase!r} and not 'Running'. Wait until it runs, or "
                    "choose labels that leave it out."
                )
        return pods

    @property
    def environment(self) -> str:
        return "kubernetes"


def _client() -> Any:
    try:
        from kubernetes import client, config
    except ImportError:
        raise ImportError(
            "KubernetesClusterResolver needs the package `kubernetes`: "
            "`pip install kubernetes`. Or pass a client as `override_client`."
        ) from None
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    return client.CoreV1Api()
