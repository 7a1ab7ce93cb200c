"""Manifests of Kubernetes: validation against the API, and the pods that they describe.

The types are those of the package `kubernetes`, which are generated from the OpenAPI
description of Kubernetes. Its own deserializer ignores unknown fields; `validate` does
not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

API_VERSIONS = {
    "ConfigMap": "v1",
    "Job": "batch/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Secret": "v1",
    "Service": "v1",
    "ServiceAccount": "v1",
}
_SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "datetime": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    # Any value, such as a port by its number or its name.
    "object": (str, int, float, bool, dict, list),
}
# "list[V1Container]" and "dict(str, str)"; newer releases write "Dict[str, str]".
_CONTAINER = re.compile(r"(list|dict)[\[(](?:str, )?(.+)[\])]", re.IGNORECASE)
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def load(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def validate(manifest: Mapping[str, Any]) -> None:
    """Checks names, types and required fields of an object against the API.

    Raises:
        ValueError: that names the first wrong field.
    """
    kind = manifest["kind"]
    if manifest["apiVersion"] != API_VERSIONS[kind]:
        raise ValueError(f"apiVersion of {kind} is {manifest['apiVersion']!r}")
    _validate(manifest, f"V1{kind}", kind)


def _validate(value: Any, kind: str, where: str) -> None:
    if kind in _SCALARS:
        is_number = isinstance(value, bool) and kind in ("int", "float")
        if is_number or not isinstance(value, _SCALARS[kind]):
            raise ValueError(f"{where} is {value!r}, not of type {kind}")
    elif container := _CONTAINER.fullmatch(kind):
        form, item = container[1].lower(), container[2]
        if not isinstance(value, list if form == "list" else dict):
            raise ValueError(f"{where} is {value!r}, not a {form}")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            _validate(each, item, f"{where}[{key!r}]")
    else:
        _validate_object(value, getattr(client, kind), where)


def _validate_object(value: Any, model: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r}, not a {model.__name__}")
    names = {field: name for name, field in model.attribute_map.items()}
    for field, each in value.items():
        if field not in names:
            raise ValueError(f"{where}.{field} is not a field of {model.__name__}")
        _validate(each, model.openapi_types[names[field]], f"{where}.{field}")
    try:
        model(**{names[field]: each for field, each in value.items()})
    except ValueError as error:  # Of a required field.
        raise ValueError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Pod:
    """A pod of an Indexed Job.

    Args:
        job: str, the Job's name.
        index: int, its completion index.
        address: str, its name in DNS and its port.
        environment: dict, the variables of its container.
        command: tuple of str, with its arguments.
    """

    job: str
    index: int
    address: str
    environment: dict[str, str]
    command: tuple[str, ...]

    @property
    def is_lead(self) -> bool:
        """Whether it is that of the lead, which has no task."""
        return "lead" in self.command


def pods(manifests: list[dict[str, Any]]) -> list[Pod]:
    """The pods of all Indexed Jobs, with the variables that Kubernetes sets."""
    jobs = [each for each in manifests if each["kind"] == "Job"]
    return [
        _pod(job, index, manifests)
        for job in jobs
        for index in range(job["spec"]["completions"])
    ]


def _pod(job: dict[str, Any], index: int, manifests: list[dict[str, Any]]) -> Pod:
    name, spec = job["metadata"]["name"], job["spec"]["template"]["spec"]
    [container] = spec["containers"]
    ports = container.get("ports", [{"containerPort": 4711}])
    return Pod(
        name,
        index,
        f"{name}-{index}.{spec['subdomain']}:{ports[0]['containerPort']}",
        _environment(container["env"], index, manifests),
        (*container["command"], *container["args"]),
    )


def _environment(
    variables: list[dict[str, Any]], index: int, manifests: list[dict[str, Any]]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in variables:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"] == {"fieldPath": _INDEX}
            text = str(index)
        elif "configMapKeyRef" in source:
            reference = source["configMapKeyRef"]
            text = _named("ConfigMap", manifests, reference)["data"][reference["key"]]
        elif "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            secret = _named("Secret", manifests, reference)
            # Its controller fills these in.
            assert secret["type"] == "kubernetes.io/service-account-token"
            assert reference["key"] in ("token", "ca.crt", "namespace")
            text = "the token that Kubernetes has made"
        else:
            # Names that are not defined before stay as they are.
            text = re.sub(
                r"\$\((\w+)\)",
                lambda match: found.get(match[1], match[0]),
                variable["value"],
            )
        found[variable["name"]] = text
    return found


def _named(
    kind: str, manifests: list[dict[str, Any]], reference: dict[str, str]
) -> dict[str, Any]:
    [found] = [
        each
        for each in manifests
        if each["kind"] == kind and each["metadata"]["name"] == reference["name"]
    ]
    return found
