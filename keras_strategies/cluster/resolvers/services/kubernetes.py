"""Pods of a Kubernetes cluster, by labels."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.services.service_members import (
    natural_order,
    own_place,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError


class KubernetesExecutableLocation(enum.Enum):
    """Location of the process, which selects the configuration of the API client."""

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """The pods of each job, from the API server.

    A pod's number is its place among the names, `worker-2` before `worker-10`.
    Without `task_type` and `task_id` a process finds itself among the pods by its
    host name, which Kubernetes makes the pod's name (or, in an indexed Job, the job's
    name and the index).

    Args:
        job_to_label_mapping: dict from job to label selectors; the pods of all
            selectors of a job are its tasks. None for
            `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: int, the port of every pod.
        rpc_layer: str, the protocol for `master()`.
        override_client: a `kubernetes.client.CoreV1Api`; None to make one.
        executable_location: a `KubernetesExecutableLocation`: `WITHIN_CLUSTER` for the
            configuration in a pod, `OFF_CLUSTER` for the user's; None to try one
            after the other.
        namespace: str or None for all namespaces.
        task_type: str, the job of this process.
        task_id: int, its number within the job.

    Raises:
        ImportError: without the package `kubernetes` and without a client.
        ValueError: from `cluster_spec()`, if a selector finds no pod, or a pod is not
            running.

    Example:

    >>> resolver = ks.cluster_resolver.KubernetesClusterResolver(
    ...     {"worker": ["app=trainer"]}, namespace="ml")
    """

    _environment = "kubernetes"

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation | None = None,
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
        self._client = (
            _client(executable_location) if override_client is None else override_client
        )
        self._found: tuple[str, int] | None = None

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(
            {
                job: [_address(pod.status.pod_ip, self._port) for pod in pods]
                for job, pods in self._pods().items()
            }
        )

    def _found_task(self) -> tuple[str | None, int | None]:
        if self._found is None:
            self._found = own_place(
                (job, [{str(p.metadata.name), str(p.spec.hostname)} for p in pods])
                for job, pods in self._pods().items()
            )
        return self._found or (None, None)

    def _pods(self) -> dict[str, list[Any]]:
        return {
            job: [pod for selector in selectors for pod in self._select(job, selector)]
            for job, selectors in self._selectors.items()
        }

    def _select(self, job: str, selector: str) -> list[Any]:
        if self._namespace is None:
            found = self._client.list_pod_for_all_namespaces(label_selector=selector)
        else:
            found = self._client.list_namespaced_pod(
                self._namespace, label_selector=selector
            )
        where = f"namespace {self._namespace!r}" if self._namespace else "any namespace"
        if not found.items:
            raise ClusterError(
                f"Job {job!r} has no pod: none in {where} has the labels {selector!r}. "
                "Check them with `kubectl get pods --show-labels`."
            )
        pods = sorted(found.items, key=lambda pod: natural_order(pod.metadata.name))
        for pod in pods:
            if pod.status.phase != "Running" or not pod.status.pod_ip:
                raise ClusterError(
                    f"Pod {pod.metadata.name!r} of job {job!r} ({selector}) is "
                    f"{pod.status.phase!r}, not 'Running'. Wait until it runs, or "
                    "choose labels that exclude it."
                )
        return pods


def _address(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _client(location: KubernetesExecutableLocation | None) -> Any:
    try:
        from kubernetes import client, config
    except ImportError:
        raise ImportError(
            "KubernetesClusterResolver needs the package `kubernetes`: "
            "`pip install kubernetes`. Or pass a client as `override_client`."
        ) from None
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    elif location is KubernetesExecutableLocation.OFF_CLUSTER:
        config.load_kube_config()
    else:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
    return client.CoreV1Api()
