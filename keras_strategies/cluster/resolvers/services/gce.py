"""Instance groups of Google Compute Engine."""

from __future__ import annotations

from typing import Any

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.services.service_members import (
    google_service,
    natural_order,
    own_place,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError


class GCEClusterResolver(ClusterResolver):
    """The running machines of an instance group, from the Compute Engine API.

    A machine's number is its place among the names, `trainer-2` before `trainer-10`.

    Args:
        project: str, the project's name.
        zone: str, such as `"us-west1-a"`.
        instance_group: str, the group's name.
        port: int, the port of every machine.
        task_type: str, the job that the machines are tasks of.
        task_id: int, the number of this process; None to find it by the machine's
            name. (`tf.distribute` takes every machine for number 0 then.)
        rpc_layer: str, the protocol for `master()`.
        credentials: `"default"`, or credentials of `google.auth`.
        service: a client as `googleapiclient.discovery.build("compute", "v1")` makes
            it; None to make one.

    Raises:
        ImportError: without the package `google-api-python-client` and a service.
        ValueError: from `cluster_spec()`, if no machine of the group is running.

    Example:

    >>> resolver = ks.cluster_resolver.GCEClusterResolver(
    ...     "my-project", "us-west1-a", "trainers", 8470)
    """

    _environment = "google"

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        super().__init__(task_type, task_id, rpc_layer)
        self._place = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = port
        if service is None:
            given = None if credentials == "default" else credentials
            name = type(self).__name__
            service = google_service("compute", "v1", name, credentials=given)
        self._service = service

    def cluster_spec(self) -> ClusterSpec:
        addresses = []
        for name in self._names():
            instance = (
                self._service.instances().get(**self._place, instance=name).execute()
            )
            network = instance["networkInterfaces"][0]
            addresses.append(f"{network['networkIP']}:{self._port}")
        return ClusterSpec({self.task_type or "worker": addresses})

    def _names(self) -> list[str]:
        """The names of the group's running machines."""
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._place, instanceGroup=self._group, body={"instanceState": "RUNNING"}
        )
        names = []
        while request is not None:
            response = request.execute()
            # "instance" is an URL: .../zones/us-west1-a/instances/trainer-1
            names += [
                item["instance"].rsplit("/", 1)[-1]
                for item in response.get("items", [])
            ]
            request = groups.listInstances_next(request, response)
        if not names:
            raise ClusterError(
                f"The instance group {self._group!r} of project "
                f"{self._place['project']!r} in zone {self._place['zone']!r} has no "
                "running machine. Start its machines, or correct the names."
            )
        return sorted(names, key=natural_order)

    def _found_task(self) -> tuple[str | None, int | None]:
        found = own_place([("", [{name} for name in self._names()])])
        self._task_id = found[1] if found else None
        return None, self._task_id
