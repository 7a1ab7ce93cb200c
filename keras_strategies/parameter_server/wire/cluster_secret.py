"""The shared secret of a cluster and the keys derived from it."""

from __future__ import annotations

import os

from keras_strategies.cluster.environment import SECRET
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.wire.transport import Keys

_LEAST_CHARACTERS = 16


def cluster_keys() -> Keys:
    """The keys of this process's cluster.

    Raises:
        ValueError: if the secret is not set.
    """
    secret = os.environ.get(SECRET, "")
    if len(secret) < _LEAST_CHARACTERS:
        raise InvalidArgumentError(
            f"The environment variable {SECRET} has {len(secret)} characters. Tasks "
            "send code to each other, so they authenticate by a shared secret. Set it "
            f"to the same value of {_LEAST_CHARACTERS} characters or more in all "
            "tasks, "
            'for example the output of `python -c "import secrets; '
            'print(secrets.token_hex())"`.'
        )
    return Keys.from_secret(secret)
