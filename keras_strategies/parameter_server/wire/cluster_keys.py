"""CurveZMQ keys of a cluster, derived from its shared secret."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from keras_strategies.cluster.environment import SECRET, SECRET_CHARACTERS
from keras_strategies.errors import InvalidArgumentError


@dataclass(frozen=True)
class Keys:
    """CurveZMQ keys, the same in all processes of a cluster.

    Args:
        service_public: bytes.
        service_secret: bytes.
        client_public: bytes.
        client_secret: bytes.
    """

    service_public: bytes
    service_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def new(cls) -> Keys:
        import zmq

        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @classmethod
    def from_secret(cls, secret: str) -> Keys:
        """Keys derived from a shared secret."""
        import zmq
        from zmq.utils import z85

        def pair(name: str) -> tuple[bytes, bytes]:
            digest = hashlib.sha256(f"{name}:{secret}".encode()).digest()
            private = z85.encode(digest)
            return zmq.curve_public(private), private

        return cls(*pair("service"), *pair("client"))


def cluster_keys() -> Keys:
    """The keys of this process's cluster.

    Raises:
        ValueError: if the secret is not set.
    """
    secret = os.environ.get(SECRET, "")
    if len(secret) < SECRET_CHARACTERS:
        raise InvalidArgumentError(
            f"The environment variable {SECRET} has {len(secret)} characters. Tasks "
            "send code to each other, so they authenticate by a shared secret. Set it "
            f"to one value of {SECRET_CHARACTERS} characters or more in all tasks, "
            'for example the output of `python -c "import secrets; '
            'print(secrets.token_hex())"`.'
        )
    return Keys.from_secret(secret)


def needs_keys(address: str) -> bool:
    """Whether connections to an address are encrypted."""
    return address.startswith("tcp://")


class ClientKeyCheck:
    """Accepts clients with the cluster's client key."""

    def __init__(self, keys: Keys):
        self._public = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public
