"""The pods that manifests of Kubernetes describe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def load(path: Path) -> list[dict[str, Any]]:
    """The objects of a file."""
    return list(yaml.safe_load_all(path.read_text()))


@dataclass(frozen=True)
class Pod:
    """A pod of an Indexed Job."""

    job: str
    #: Its completion index.
    index: int
    #: Its name in DNS and its port.
    address: str
    environment: dict[str, str]
    #: With its arguments.
    command: tuple[str, ...]

    @property
    def is_lead(self) -> bool:
        """Whether it is that of the lead, which has no task."""
        return "lead" in self.command


def pods(manifests: list[dict[str, Any]]) -> list[Pod]:
    """The pods of all Indexed Jobs, with the variables that Kubernetes sets."""
    return [
        _pod(job, index, manifests)
        for job in manifests
        if job["kind"] == "Job"
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
