"""Union of several clusters."""

from __future__ import annotations

from keras_strategies.cluster.resolver import ClusterResolver, as_resolver
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError, InvalidTypeError


class UnionResolver(ClusterResolver):
    """Joins the jobs of several resolvers.

    If two resolvers have the same job, tasks of lists are appended in the order of the
    resolvers, and tasks with explicit numbers have the same numbers in the union. The
    task, the protocol and the environment are those of the first resolver that has one.

    Args:
        *resolvers: `ClusterResolver`s, at least one.
        task_type: str, the job of this process instead of theirs.
        task_id: int, its number instead of theirs.
        rpc_layer: str, the protocol instead of theirs.

    Raises:
        TypeError: if an argument is not a resolver.
        ValueError: without a resolver, or if two have different addresses for a task.

    Example:

    >>> union = ks.cluster_resolver.UnionResolver(workers, parameter_servers)
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ):
        if not resolvers:
            raise ClusterError("UnionResolver needs at least one resolver.")
        for resolver in resolvers:
            if not callable(getattr(resolver, "cluster_spec", None)):
                raise InvalidTypeError(
                    "Arguments of UnionResolver must be resolvers of "
                    f"ks.cluster_resolver. Received: {resolver!r} of type "
                    f"{type(resolver).__name__}"
                )
        resolvers = tuple(as_resolver(each, "resolvers") for each in resolvers)
        self._resolvers = resolvers
        named = (each.environment for each in resolvers)
        self._environment = next(filter(None, named), "")
        own = next((r for r in resolvers if r.task_type is not None), resolvers[0])
        layers = [r.rpc_layer for r in resolvers if r.rpc_layer is not None]
        super().__init__(
            own.task_type if task_type is None else task_type,
            own.task_id if task_id is None else task_id,
            rpc_layer if rpc_layer is not None else next(iter(layers), None),
        )

    def cluster_spec(self) -> ClusterSpec:
        joined: dict[str, dict[int, str]] = {}
        for resolver in self._resolvers:
            for job, given in resolver.cluster_spec().as_dict().items():
                tasks = joined.setdefault(job, {})
                if isinstance(given, list):
                    start = max(tasks, default=-1) + 1
                    given = dict(enumerate(given, start))
                for index, address in given.items():
                    if tasks.get(index, address) != address:
                        raise ClusterError(
                            f"Task {job!r} {index} is at {tasks[index]!r} in one of "
                            f"the joined clusters and at {address!r} in another. Give "
                            "each task one address."
                        )
                    tasks[index] = address
        return ClusterSpec(joined)

    def _accelerators_of(self, job: str | None, index: int | None) -> dict[str, int]:
        found: dict[str, int] = {}
        for resolver in self._resolvers:
            found = {**resolver.num_accelerators(job, index), **found}
        return found
