"""All that this package uses of JAX beyond its public interface.

Tested with JAX 0.10.2 and 0.12.0, which is why the extra `jax` ends below 0.13.
`PRIVATE_NAMES` has a row for each name; `tests/keras_compat/test_manifest.py` fails if
one is missing in the installed version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat.private_names import Private
from keras_strategies.runtime.thread_scheduling import scheduled_as_batch

PRIVATE_NAMES = (
    Private(
        "jax._src.array.ArrayImpl",
        ("_arrays",),
        "Reduced values may be used with variables on several devices.",
    ),
    Private(
        "jax._src.core",
        ("trace_ctx", "trace_state_clean"),
        "Whether this thread is in a trace, or differentiates.",
    ),
    Private(
        "jax._src.distributed",
        ("global_state",),
        "The JAX cluster of this process.",
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
        "As `distributed.State`; Gloo on one network interface.",
    ),
    Private(
        "jax._src.xla_bridge",
        ("_backend_factories", "backends_are_initialized", "make_cpu_client"),
        "Whether devices can be configured; Gloo on one network interface.",
    ),
    Private(
        "jax.interpreters.partial_eval",
        ("dce_jaxpr",),
        "The values that a result depends on.",
    ),
    Private(
        "jax._src.interpreters.ad",
        ("JVPTrace", "LinearizeTrace"),
        "Calls of models in a function that is differentiated.",
    ),
)


def devices_are_fixed() -> bool:
    """Whether JAX has been used, so that its devices can no longer change.

    JAX 0.10: `xla_bridge.backends_are_initialized`; listing the devices would
    initialize them.
    """
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def is_tracing() -> bool:
    """Whether this thread is in a trace.

    JAX 0.10: `core.trace_state_clean`.
    """
    from jax._src import core

    return not core.trace_state_clean()


def is_differentiating() -> bool:
    """Whether this thread is in a function that is differentiated.

    JAX 0.10: traces of `interpreters.ad`, in `core.trace_ctx`. False in a program
    within such a function.
    """
    from jax._src import core
    from jax._src.interpreters import ad

    return isinstance(core.trace_ctx.trace, (ad.JVPTrace, ad.LinearizeTrace))


# A day: the group's hub detects lost workers, in seconds.
_HEARTBEAT = 24 * 3600
_END = 5


def runtime_is_started() -> bool:
    """Whether `jax.distributed` is initialized in this process.

    JAX 0.10: `distributed.global_state`, by `jax.distributed.is_initialized`.
    """
    import jax

    return bool(jax.distributed.is_initialized())


def end_runtime(index: int, count: int) -> bool:
    """Shuts down `jax.distributed`, if it connects the same processes.

    JAX 0.10: `distributed.global_state`, which `jax.distributed.initialize` sets.

    Args:
        index: int, the number that this process must have there.
        count: int, the number of processes, which all call this.

    Returns:
        bool, whether it was shut down.
    """
    import jax
    from jax._src import distributed

    state = distributed.global_state
    if (state.process_id, state.num_processes) != (index, count):
        return False
    jax.distributed.shutdown()
    return True


def start_service(address: str, count: int) -> None:
    """Starts the coordination service, in the chief's process.

    JAX 0.10: as `distributed.State.initialize`, with `recoverable`, so that a
    process that ends does not wait for all others to end.

    Args:
        address: str, the address to listen at, such as `"unix:/tmp/x/service"`.
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


def start_client(
    address: str,
    count: int,
    index: int,
    timeout: float,
    waiting: Callable[[Callable[[], Any]], Any],
) -> None:
    """Connects this process to the service; then the devices of all processes exist.

    JAX 0.10: as `distributed.State.initialize`, without its handler of SIGTERM.

    Args:
        address: str, `"host:port"`.
        count: int, the number of processes.
        index: int, the number of this process.
        timeout: float, seconds.
        waiting: called with a function that waits for the service; returns its result.
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
    waiting(client.connect)
    state.client = client


def use_host_for_collectives(
    host: str,
    listening: Callable[[Callable[[], Any]], Any],
    waiting: Callable[[Callable[[], Any]], Any],
) -> None:
    """Makes Gloo, between CPU devices, use one network interface of this machine.

    Args:
        host: str, the address of the interface.
        listening: called with the function that creates Gloo's listener, when JAX
            creates its devices; returns the result.

    JAX 0.10: `xla_bridge.make_cpu_client`, the factory of "cpu" in
    `_backend_factories`, would use the interface of the machine's host name.
    """
    import dataclasses

    import jax
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    if jax.config.jax_cpu_collectives_implementation != "gloo":  # type: ignore[attr-defined]
        return  # The user has chosen other collectives.

    def make() -> Any:
        client = distributed.global_state.client
        with scheduled_as_batch():
            collectives = listening(
                lambda: _jax.make_gloo_tcp_collectives(client, hostname=host)
            )

        def devices() -> Any:
            with scheduled_as_batch():
                return xla_bridge.make_cpu_client(collectives)

        return waiting(devices)

    factories = xla_bridge._backend_factories
    factories["cpu"] = dataclasses.replace(factories["cpu"], factory=make)


def stop_client() -> None:
    """Closes the connection to the service (`distributed.State.shutdown`)."""
    from jax._src import distributed

    client, distributed.global_state.client = distributed.global_state.client, None
    if client is not None:
        client.shutdown()


def stop_service() -> None:
    """Stops the service, if this process runs it."""
    from jax._src import distributed

    service, distributed.global_state.service = distributed.global_state.service, None
    if service is not None:
        service.shutdown()


# Clients, services and relays of replaced runtimes, kept until the process ends.
_abandoned: list[Any] = []


def abandon_runtime(*parts: Any) -> None:
    """Removes the devices, without stopping the client and the service.

    When a service stops, the processes of its clients end. So client, service and
    `parts`, the relays between them, are kept until this process ends. Arrays on the
    removed devices can still be read. JAX 0.10: `distributed.global_state`;
    `distributed.initialize` would refuse a second cluster.
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
        and whether any equation reads it, even if no result depends on that equation
        (a loss that is not returned has a gradient). Returning a value unchanged does
        not count.

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
    """For each result, the index of the argument leaf that it is; None for new values.

    JAX 0.10: the variable of an unchanged input is the same object among the outputs
    of a jaxpr.
    """
    import jax

    jaxpr = jax.make_jaxpr(fn)(batch).jaxpr
    leaves = {id(variable): i for i, variable in enumerate(jaxpr.invars)}
    return [leaves.get(id(variable)) for variable in jaxpr.outvars]


def uncommitted(array: Any) -> Any:
    """The same array on one device, not committed to it."""
    from jax._src.array import ArrayImpl

    return ArrayImpl(array.aval, array.sharding, array._arrays, committed=False)
