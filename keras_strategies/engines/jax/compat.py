"""All that this package uses of JAX beyond its public interface.

Tested with JAX 0.10.2, which is why the extra `jax` ends below 0.11. `PRIVATE_NAMES`
has a row for each name, and `tests/test_manifest.py` says what has moved.
"""

from __future__ import annotations

import contextlib
from typing import Any

from keras_strategies.keras_compat.private_names import Private
from keras_strategies.runtime.gloo_threads import gloo_threads

PRIVATE_NAMES = (
    Private(
        "jax._src.core",
        ("set_current_trace", "trace_ctx", "trace_state_clean"),
        "Threads of replicas go on with one trace.",
    ),
    Private(
        "jax._src.distributed",
        ("global_state",),
        "The cluster that this process belongs to.",
    ),
    Private(
        "jax._src.distributed.State",
        ("client", "coordinator_address", "num_processes", "process_id", "service"),
        "Service and client with our own timeouts, without a handler of SIGTERM.",
    ),
    Private(
        "jax._src.lib._jax",
        (
            "get_distributed_runtime_client",
            "get_distributed_runtime_service",
            "make_gloo_tcp_collectives",
        ),
        "As `distributed.State`; collectives on one interface of the machine.",
    ),
    Private(
        "jax._src.xla_bridge",
        ("_backend_factories", "backends_are_initialized", "make_cpu_client"),
        "Whether devices can be configured; Gloo on one interface of the machine.",
    ),
    Private(
        "jax.interpreters.partial_eval",
        ("dce_jaxpr",),
        "The values that a result depends on.",
    ),
)


def devices_are_fixed() -> bool:
    """Whether JAX has been used, so that its devices can no longer change.

    JAX 0.10: `xla_bridge.backends_are_initialized`; asking for the devices would fix
    them.
    """
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def is_tracing() -> bool:
    """Whether this thread is in a trace.

    JAX 0.10: `core.trace_state_clean`.
    """
    from jax._src import core

    return not core.trace_state_clean()


def current_trace() -> Any:
    """The trace of this thread, which another one can go on with.

    JAX 0.10: `core.trace_ctx`, a thread's own; `jax.core.eval_context` is the public
    way out of a trace, and there is none into one.
    """
    from jax._src import core

    return core.trace_ctx.trace


def with_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes a trace this thread's (`core.set_current_trace`)."""
    from jax._src import core

    context: contextlib.AbstractContextManager[Any] = core.set_current_trace(trace)
    return context


# A day: the group's hub detects lost workers, in seconds.
_HEARTBEAT = 24 * 3600
_END = 5


def runtime_is_started() -> bool:
    """Whether this process belongs to a cluster of JAX's already.

    JAX 0.10: `distributed.global_state`, as `jax.distributed.is_initialized`.
    """
    import jax

    return bool(jax.distributed.is_initialized())


def end_runtime(index: int, count: int) -> bool:
    """Ends the cluster of JAX's that this process belongs to, if it is of these.

    JAX 0.10: `distributed.global_state`, which `jax.distributed.initialize` sets.

    Args:
        index: int, the number of this process.
        count: int, the number of processes, which all call this.

    Returns:
        Whether it was; otherwise nothing has changed.
    """
    import jax
    from jax._src import distributed

    state = distributed.global_state
    if (state.process_id, state.num_processes) != (index, count):
        return False
    jax.distributed.shutdown()
    return True


def start_service(address: str, count: int) -> None:
    """Starts the service that processes find one another through, in the chief.

    JAX 0.10: as `distributed.State.initialize`, with `recoverable`, so that a
    process that ends does not wait for all others to end.

    Args:
        address: str, where it listens, such as `"unix:/tmp/x/service"`.
        count: int, the number of processes.
    """
    from jax._src import distributed
    from jax._src.lib import _jax

    distributed.global_state.service = _jax.get_distributed_runtime_service(
        address,
        count,
        heartbeat_timeout=_HEARTBEAT,
        shutdown_timeout=_END,
        recoverable=True,
    )


def start_client(address: str, count: int, index: int, timeout: float) -> None:
    """Connects this process with the service; devices of all exist afterwards.

    JAX 0.10: as `distributed.State.initialize`, without its handler of SIGTERM.

    Args:
        address: str, `"host:port"`.
        count: int, the number of processes.
        index: int, the number of this one.
        timeout: float, seconds.
    """
    from jax._src import distributed
    from jax._src.lib import _jax

    state = distributed.global_state
    state.process_id, state.num_processes = index, count
    state.coordinator_address = address
    client = _jax.get_distributed_runtime_client(
        address,
        index,
        init_timeout=max(int(timeout), 1),
        shutdown_timeout=_END,
        heartbeat_timeout=_HEARTBEAT,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.client = client


def use_host_for_collectives(host: str) -> None:
    """Makes Gloo, between CPU devices, use one interface of this machine.

    JAX 0.10: `xla_bridge.make_cpu_client`, the factory of "cpu" in
    `_backend_factories`, uses the interface of the machine's name.
    """
    import dataclasses

    import jax
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    if jax.config.jax_cpu_collectives_implementation != "gloo":  # type: ignore[attr-defined]
        return  # The user has chosen another one.

    def make() -> Any:
        client = distributed.global_state.client
        with gloo_threads():
            collectives = _jax.make_gloo_tcp_collectives(client, hostname=host)
            return xla_bridge.make_cpu_client(collectives)

    factories = xla_bridge._backend_factories
    factories["cpu"] = dataclasses.replace(factories["cpu"], factory=make)


def stop_client() -> None:
    """Ends the connection with the service (`distributed.State.shutdown`)."""
    from jax._src import distributed

    client, distributed.global_state.client = distributed.global_state.client, None
    if client is not None:
        client.shutdown()


def stop_service() -> None:
    """Ends the service, where this process has it."""
    from jax._src import distributed

    service, distributed.global_state.service = distributed.global_state.service, None
    if service is not None:
        service.shutdown()


# Parts of runtimes that were replaced.
_abandoned: list[Any] = []


def abandon_runtime(*parts: Any) -> None:
    """Removes the devices, and leaves the client and the service as they are.

    The end of a service ends the processes of its clients, so that they, and `parts`
    between them, exist as long as this process. Arrays of the devices can be read
    afterwards. JAX 0.10: `distributed.global_state`; `distributed.initialize` would
    refuse a second one.
    """
    import jax
    import jax.extend.backend
    from jax._src import distributed

    state = distributed.global_state
    _abandoned.append((state.client, state.service, *parts))
    state.client = state.service = None
    jax.clear_caches()
    jax.extend.backend.clear_backends()


def used_inputs(fn: Any, values: Any, batch: Any) -> tuple[list[bool], list[bool]]:
    """Values that a function's first result depends on, and values that it reads.

    Args:
        fn: callable of a list of values and a batch that returns a pair.
        values: list of `jax.ShapeDtypeStruct`.
        batch: structure of arrays.

    Returns:
        Two lists with a bool for each value: whether the first result depends on it,
        and whether something is computed from it, also when no result depends on
        that: a loss that is not returned has a gradient. A value that is passed on
        unchanged does not count.

    JAX 0.10: `jax.interpreters.partial_eval.dce_jaxpr`.
    """
    import jax
    from jax.interpreters import partial_eval

    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(values, batch)
    jaxpr = closed.jaxpr
    first = len(jax.tree.leaves(shapes[0]))
    inputs = set(map(id, jaxpr.invars))
    wanted = [
        i < first and id(out) not in inputs for i, out in enumerate(jaxpr.outvars)
    ]
    _, found = partial_eval.dce_jaxpr(jaxpr, wanted)
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    own = jaxpr.invars[: len(values)]
    return list(found[: len(values)]), [id(variable) in read for variable in own]


def passed_on(fn: Any, batch: Any) -> list[int | None]:
    """The leaf of the argument that each result of a function is, None for a new value.

    JAX 0.10: variables of a jaxpr that goes in and comes out are the same objects.
    """
    import jax

    jaxpr = jax.make_jaxpr(fn)(batch).jaxpr
    leaves = {id(variable): i for i, variable in enumerate(jaxpr.invars)}
    return [leaves.get(id(variable)) for variable in jaxpr.outvars]
