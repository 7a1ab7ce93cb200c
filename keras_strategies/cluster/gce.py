"""Machines of an instance group of Google Compute Engine."""

from __future__ import annotations

from typing import Any

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec


class GCEClusterResolver(ClusterResolver):
    """Asks the Compute Engine for the machines of an instance group.

    Args:
        project: str, the project's name.
        zone: str, such as `"us-west1-a"`.
        instance_group: str, the group's name.
        port: int, the port of every machine.
        task_type: str, the job that the machines are tasks of.
        task_id: int, the number of this process.
        rpc_layer: str, the protocol for `master()`.
        credentials: `"default"`, or credentials of `google.auth`.
        service: a client as `googleapiclient.discovery.build("compute", "v1")` makes
            it; None to make one.

    Raises:
        ImportError: without the package `google-api-python-client` and a service.

    Example:

    >>> resolver = ks.cluster_resolver.GCEClusterResolver(
    ...     "my-project", "us-west1-a", "trainers", 8470)
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        self._project = project
        self._zone = zone
        self._group = instance_group
        self._port = port
        self._service = service if service is not None else _service(credentials)

    def cluster_spec(self) -> ClusterSpec:
        place = {"project": self._project, "zone": self._zone}
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **place, instanceGroup=self._group, body={"instanceState": "RUNNING"}
        )
        addresses = []
        while request is not None:
            response = request.execute()
            for item in response.get("items", []):
                name = item["instance"].rsplit("/", 1)[-1]
                instance = (
                    self._service.instances().get(**place, instance=name).execute()
                )
                network = instance["networkInterfaces"][0]
                addresses.append(f"{network['networkIP']}:{self._port}")
            request = groups.listInstances_next(request, response)
        return ClusterSpec({self.task_type or "worker": sorted(addresses)})

    @property
    def environment(self) -> str:
        return "google"


def _service(credentials: Any) -> Any:
    try:
        from googleapiclient import discovery
    except ImportError:
        raise ImportError(
            "GCEClusterResolver needs the package `google-api-python-client`: "
            "`pip install google-api-python-client`. Or pass a client as `service`."
        ) from None
    given = None if credentials == "default" else credentials
    return discovery.build("compute", "v1", credentials=given)
