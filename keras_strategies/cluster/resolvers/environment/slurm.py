"""Environment variables of SLURM, for processes that `srun` starts.

SLURM_STEP_NODELIST=gpu[01-03,07],login2
SLURM_STEP_TASKS_PER_NODE=2(x3),1,4
SLURM_DISTRIBUTION=cyclic
SLURM_PROCID=5 SLURM_NODEID=2 SLURM_LOCALID=1
CUDA_VISIBLE_DEVICES=0,1
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from keras_strategies.cluster.resolver import FixedClusterResolver
from keras_strategies.cluster.resolvers.environment.process_numbers import number
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.errors import ClusterError

# Variables of a job step, and of the job where there is no step.
NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
PROCESS = "SLURM_PROCID"
# The number of this process's node among those of the step, and its number there.
NODE = "SLURM_NODEID"
PLACE = "SLURM_LOCALID"
DISTRIBUTION = "SLURM_DISTRIBUTION"
PLANE_SIZE = "SLURM_DIST_PLANESIZE"
# Set if `srun` has assigned GPUs to each task; "none" if not.
BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND")
ALL = (
    *NODE_LIST,
    *TASKS_PER_NODE,
    *NUM_TASKS,
    *(PROCESS, NODE, PLACE, DISTRIBUTION, PLANE_SIZE),
    *BOUND,
)
GPUS = "CUDA_VISIBLE_DEVICES"
# `GPUS` before and after sharing, so that the next resolver, or one in a child process,
# does not share it again.
SHARED = "KS_SLURM_GPUS"


def expand_node_list(text: str) -> list[str]:
    """The hosts of a SLURM node list.

    Args:
        text: str, such as `"gpu[01-03,07],login2"`; several brackets in one name
            multiply, and numbers keep their leading zeros.

    Returns:
        list of str, in SLURM's order.

    Raises:
        ValueError: if brackets do not match or a range is reversed.

    Example:

    >>> expand_node_list("gpu[08-10],login2")
    ['gpu08', 'gpu09', 'gpu10', 'login2']
    """
    # Commas inside of brackets do not separate hosts.
    patterns = re.findall(r"(?:[^,\[\]]+|\[[^\[\]]*\])+", text.strip())
    if ",".join(patterns) != text.strip() or not patterns:
        raise ClusterError(
            f"{text!r} is not a node list. Expected something like "
            '"gpu[01-03,07],login2".'
        )
    return [host for pattern in patterns for host in _expand(pattern, text)]


def _expand(pattern: str, text: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", pattern)
    if match is None:
        return [pattern]
    hosts = []
    for part in match[1].split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None:
            raise ClusterError(
                f"{part!r} in the node list {text!r} is not a number or a range, such "
                'as "01-03".'
            )
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ClusterError(
                f"The range {part!r} in the node list {text!r} is reversed."
            )
        for each in range(int(first), int(last) + 1):
            name = str(each).zfill(len(first))
            begun = pattern[: match.start()] + name + pattern[match.end() :]
            hosts += _expand(begun, text)
    return hosts


def expand_tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each node.

    Args:
        text: str, such as `"2(x3),1"`, which stands for 2, 2, 2, 1.

    Returns:
        list of int.

    Raises:
        ValueError: for anything else.
    """
    found: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ClusterError(
                f'{text!r} is not a list of tasks per node such as "2(x3),1".'
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


class SlurmClusterResolver(FixedClusterResolver):
    """Reads the variables of a SLURM job step: each of its tasks is one of the cluster.

    Tasks are placed on nodes according to `srun --distribution`: `block`, `cyclic` or
    `plane`.

    Args:
        jobs: dict from job to its number of tasks, in the order of SLURM's process
            numbers; None for `{"worker": all}`.
        port_base: int, the port of the first task on a node; the next task on the
            node has the next port.
        gpus_per_node: int, GPUs of a node; None for those in `CUDA_VISIBLE_DEVICES`.
        gpus_per_task: int, GPUs of a task; None to share a node's equally.
        tasks_per_node: int, a list with one for each node, or a dict from node to
            number; None for SLURM's.
        auto_set_gpu: bool, whether to set `CUDA_VISIBLE_DEVICES` to this task's share
            of the node's GPUs. It is unchanged if `srun` was started with
            `--gpus-per-task` or `--gpu-bind`, unless `gpus_per_node` or `gpus_per_task`
            is given here.
        rpc_layer: str, the protocol for `master()`.

    Raises:
        ValueError: if variables are missing, or do not fit the arguments.

    Example:

    >>> resolver = ks.cluster_resolver.SlurmClusterResolver(
    ...     jobs={"ps": 1, "worker": 3})
    """

    _environment = "slurm"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = None,
    ):
        self._hosts = expand_node_list(os.environ[_set_one(NODE_LIST)])
        self._counts = self._tasks_of_nodes(tasks_per_node)
        total = sum(self._counts)
        jobs = {"worker": total} if jobs is None else jobs
        if sum(jobs.values()) != total:
            raise ClusterError(
                f"The jobs {dict(jobs)} have {sum(jobs.values())} tasks, but "
                f"SLURM runs {total} on {self._hosts} ({self._counts} of them on "
                "each). Change `jobs`, or `--ntasks` of `srun`."
            )
        process = _number((PROCESS,))
        if process >= total:
            raise ClusterError(
                f"{PROCESS} is {process}, but there are only {total} tasks, numbered "
                "from 0. Check `tasks_per_node`."
            )
        self._places = _distribute(self._counts)
        self._check_place(process)
        tasks = [(job, i) for job, count in jobs.items() for i in range(count)]
        super().__init__(*tasks[process], rpc_layer)
        cluster: dict[str, list[str]] = {job: [] for job in jobs}
        for (job, _), (node, place) in zip(tasks, self._places, strict=True):
            cluster[job].append(f"{self._hosts[node]}:{port_base + place}")
        self._spec = ClusterSpec(cluster)
        gpus = self._share_of_gpus(process, gpus_per_node, gpus_per_task)
        self._accelerators = {"GPU": len(gpus)}
        if auto_set_gpu and gpus:
            own = ",".join(gpus)
            os.environ[SHARED] = f"{_gpus_before_sharing()};{own}"
            os.environ[GPUS] = own

    def _tasks_of_nodes(
        self, given: int | Sequence[int] | Mapping[str, int] | None
    ) -> list[int]:
        nodes = len(self._hosts)
        if isinstance(given, int):
            counts = [given] * nodes
        elif isinstance(given, Mapping):
            if set(given) != set(self._hosts):
                raise ClusterError(
                    f"`tasks_per_node` names the nodes {sorted(given)}, but SLURM "
                    f"runs on {self._hosts}. Name each of these."
                )
            counts = [int(given[host]) for host in self._hosts]
        elif given is not None:
            counts = [int(count) for count in given]
        elif any(os.environ.get(name) for name in TASKS_PER_NODE):
            counts = expand_tasks_per_node(os.environ[_set_one(TASKS_PER_NODE)])
        else:
            total = _number(NUM_TASKS)
            counts = [total // nodes + (i < total % nodes) for i in range(nodes)]
        if len(counts) != nodes:
            raise ClusterError(
                f"There are {nodes} nodes, {self._hosts}, but task counts for "
                f"{len(counts)}: {counts}. Give `tasks_per_node` one number per node."
            )
        return counts

    def _check_place(self, process: int) -> None:
        """Checks the computed node and local rank against SLURM's.

        They differ for distributions such as `arbitrary`, for which the addresses would
        be wrong.
        """
        node, place = self._places[process]
        for name, expected in ((NODE, node), (PLACE, place)):
            if os.environ.get(name) and _number((name,)) != expected:
                raise ClusterError(
                    f"{PROCESS} is {process}, which should be on node {node} "
                    f"({self._hosts[node]}) as its task {place} with {self._counts} "
                    f"tasks on the nodes, but {name} is {_number((name,))}. Start "
                    "the script with `srun --distribution=block`."
                )

    def _share_of_gpus(
        self, process: int, per_node: int | None, per_task: int | None
    ) -> list[str]:
        if per_node is not None:
            names = [str(i) for i in range(per_node)]
        else:
            names = [g for g in _gpus_before_sharing().split(",") if g.strip()]
            bound = [os.environ.get(name, "none") for name in BOUND]
            if per_task is None and any(how not in ("", "none") for how in bound):
                return names
        if not names:
            return []
        node, place = self._places[process]
        share = per_task if per_task is not None else len(names) // self._counts[node]
        if share * self._counts[node] > len(names):
            raise ClusterError(
                f"{self._counts[node]} tasks on node {self._hosts[node]!r} need "
                f"{share} GPUs each, but there are {len(names)}: {names}. Lower "
                "`gpus_per_task`, or start fewer tasks per node."
            )
        return names[place * share : (place + 1) * share]


def _distribute(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The node of each process, and its number there.

    See "--distribution" in the manual of `srun`: `block` fills the first node first,
    `cyclic` goes around the nodes, `plane` goes around with several at a time.
    """
    # Such as "block", "cyclic:block" (the second is about sockets), "plane=2".
    kind = re.split("[:,=]", os.environ.get(DISTRIBUTION, "").lower())[0]
    if kind == "cyclic":
        at_a_time = 1
    elif kind == "plane":
        at_a_time = max(1, _number((PLANE_SIZE,)))
    else:
        at_a_time = max(counts, default=1)
    places = []
    rounds = -(-max(counts, default=0) // max(1, at_a_time))
    for start in range(0, rounds * at_a_time, at_a_time):
        for node, count in enumerate(counts):
            places += [(node, i) for i in range(start, min(start + at_a_time, count))]
    return places


def _gpus_before_sharing() -> str:
    now = os.environ.get(GPUS, "")
    before, _, made = os.environ.get(SHARED, "").partition(";")
    return before if made and made == now else now


def _number(names: Sequence[str]) -> int:
    return number(_set_one(names))


def _set_one(names: Sequence[str]) -> str:
    """The first of some variables that is set."""
    for name in names:
        if os.environ.get(name):
            return name
    raise ClusterError(
        f"None of the environment variables {list(names)} is set; SLURM sets them "
        "for each process. Start the script with `srun`."
    )
