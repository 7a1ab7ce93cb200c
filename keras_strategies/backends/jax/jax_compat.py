"""All that this package uses of JAX beyond its public interface.

Tested with JAX 0.10.2, which is why the extra `jax` ends below 0.11;
`tests/backends/test_jax.py` fails when one of these symbols moves.
"""

from __future__ import annotations

import contextlib
from typing import Any


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
