"""Resolvers that ask a service, through the official clients where there are any.

The clients are real; what they talk to is a server on this machine that answers as
the service does.
"""

from __future__ import annotations

import http.server
import json
import re
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import kubernetes
import pytest
from google.auth.credentials import AnonymousCredentials
from googleapiclient import discovery

from keras_strategies import cluster
from keras_strategies.cluster.resolvers.services import cloud_tpu, service_members

pytestmark = pytest.mark.one_backend("jax")

Answer = Callable[[str, dict[str, list[str]], dict], tuple[int, object]]
Serve = Callable[[Answer], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server on the loopback that answers as a function says."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                url = urllib.parse.urlsplit(self.path)
                query = urllib.parse.parse_qs(url.query)
                query |= {name: [text] for name, text in self.headers.items()}
                code, found = answer(url.path, query, body)
                text = found if isinstance(found, str) else json.dumps(found)
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


# --- Kubernetes ---------------------------------------------------------------


def pod(
    name: str, ip: str | None, phase: str = "Running", hostname: str | None = None
) -> dict:
    """A pod as `GET /api/v1/pods` gives it, shortened."""
    status = {"phase": phase, "hostIP": "10.128.0.9", "qosClass": "Burstable"}
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    metadata = {"name": name, "namespace": "ml", "labels": {"app": "trainer"}}
    containers = [{"name": "trainer", "image": "trainer:1"}]
    spec = {"containers": containers, "hostname": hostname}
    return {"metadata": metadata, "spec": spec, "status": status}


def kubernetes_api(pods: dict[tuple[str, str], list[dict]]) -> Answer:
    """Pods by path and label selector."""

    def answer(path: str, query: dict, body: dict) -> tuple[int, object]:
        items = pods.get((path, query["labelSelector"][0]), [])
        return 200, {"apiVersion": "v1", "kind": "PodList", "items": items}

    return answer


def resolver_of(
    serve: Serve, pods: dict[str, list[dict]], **options: object
) -> cluster.KubernetesClusterResolver:
    """The resolver of a cluster with pods by label selector, by default workers."""
    namespace = options.get("namespace")
    path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
    url = serve(kubernetes_api({(path, name): found for name, found in pods.items()}))
    client = kubernetes.client.ApiClient(kubernetes.client.Configuration(host=url))
    options["override_client"] = kubernetes.client.CoreV1Api(client)
    jobs = options.pop("jobs", {"worker": list(pods)})
    return cluster.KubernetesClusterResolver(jobs, **options)


def test_pods_are_numbered_by_their_names(serve) -> None:
    pods = [pod(f"trainer-{i}", f"10.0.0.{i}") for i in (10, 2, 1)]
    resolver = resolver_of(serve, {"app=trainer": pods})
    resolver.task_type, resolver.task_id = "worker", 2  # As `tf.distribute` has it.
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470", "10.0.0.10:8470"]
    }
    assert resolver.master() == "grpc://10.0.0.10:8470"
    assert resolver.environment == "kubernetes"


def test_jobs_and_selectors_in_a_namespace(serve) -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "ps": "fd00::7"}
    pods = {f"role={role}": [pod(f"{role}-0", ip)] for role, ip in addresses.items()}
    jobs = {"worker": ["role=a", "role=b"], "ps": ["role=ps"]}
    resolver = resolver_of(serve, pods, jobs=jobs, tf_server_port=2222, namespace="ml")
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:2222", "10.0.0.2:2222"],
        "ps": ["[fd00::7]:2222"],
    }


def test_a_pod_finds_itself_by_its_host_name(serve, monkeypatch) -> None:
    # An indexed Job: the host name has the index, the pod's name a random end too.
    pods = [pod(f"job-{i}-x{i}z", f"10.0.0.{i}", hostname=f"job-{i}") for i in (0, 1)]
    resolver = resolver_of(serve, {"job-name=job": pods})
    monkeypatch.setattr(service_members.socket, "gethostname", lambda: "elsewhere")
    assert (resolver.task_type, resolver.task_id) == (None, None)
    monkeypatch.setattr(service_members.socket, "gethostname", lambda: "job-1")
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://10.0.0.1:8470"


@pytest.mark.parametrize(
    "pods, message",
    [
        ([pod("t-0", None, "Pending")], r"'t-0' of job 'worker'.*is 'Pending'"),
        ([pod("t-0", "10.0.0.1", "Succeeded")], "is 'Succeeded'"),
        ([], r"has no pod: none in any namespace has the labels 'app=trainer'"),
    ],
)
def test_pods_that_cannot_train(serve, pods, message) -> None:
    with pytest.raises(ValueError, match=message):
        resolver_of(serve, {"app=trainer": pods}).cluster_spec()


def test_the_users_configuration_of_kubernetes(serve, tmp_path, monkeypatch) -> None:
    pods = [pod("t-0", "10.0.0.1")]
    url = serve(kubernetes_api({("/api/v1/pods", "job-name=tensorflow"): pods}))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    monkeypatch.setattr(
        kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path)
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    off = cluster.KubernetesExecutableLocation.OFF_CLUSTER
    for location in (None, off):
        resolver = cluster.KubernetesClusterResolver(executable_location=location)
        assert resolver.cluster_spec().num_tasks("worker") == 1
    within = cluster.KubernetesExecutableLocation.WITHIN_CLUSTER
    with pytest.raises(kubernetes.config.ConfigException):
        cluster.KubernetesClusterResolver(executable_location=within)


# --- Compute Engine -----------------------------------------------------------


def compute_api(names: list[str], page_size: int = 2) -> Answer:
    """An instance group, listed page by page, and its machines."""
    base = "/compute/v1/projects/proj/zones/us-west1-a"

    def answer(path: str, query: dict, body: dict) -> tuple[int, object]:
        if path == f"{base}/instanceGroups/trainers/listInstances":
            assert body == {"instanceState": "RUNNING"}
            start = int(query.get("pageToken", ["0"])[0])
            page = names[start : start + page_size]
            found: dict = {"kind": "compute#instanceGroupsListInstances"}
            url = f"https://www.googleapis.com{base}/instances/"
            if page:
                items = [{"instance": url + each, "status": "RUNNING"} for each in page]
                found["items"] = items
            if start + page_size < len(names):
                found["nextPageToken"] = str(start + page_size)
            return 200, found
        match = re.fullmatch(f"{base}/instances/([a-z]+-([0-9]+))", path)
        if match and match[1] in names:
            network = {"networkIP": f"10.128.0.{match[2]}", "name": "nic0"}
            return 200, {"name": match[1], "networkInterfaces": [network]}
        return 404, {"error": {"code": 404, "message": f"{path} was not found"}}

    return answer


def google_client(name: str, version: str, url: str) -> object:
    return discovery.build(
        name,
        version,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": url},
        static_discovery=True,
    )


def gce(url: str, **arguments: object) -> cluster.GCEClusterResolver:
    return cluster.GCEClusterResolver(
        *("proj", "us-west1-a", "trainers", 8470),
        service=google_client("compute", "v1", f"{url}/compute/v1/"),
        **arguments,
    )


def test_machines_of_every_page_are_numbered_by_their_names(serve) -> None:
    url = serve(compute_api(["trainer-10", "trainer-2", "trainer-1"]))
    resolver = gce(url, task_id=1)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.128.0.1:8470", "10.128.0.2:8470", "10.128.0.10:8470"]
    }
    assert resolver.master() == "grpc://10.128.0.2:8470"
    assert resolver.environment == "google"


def test_a_machine_finds_itself_by_its_name(serve, monkeypatch) -> None:
    url = serve(compute_api(["trainer-1", "trainer-2"]))
    numbers = {"trainer-2.us-west1-a.c.proj.internal": 1, "trainer-1": 0}
    for name in (*numbers, "laptop"):
        monkeypatch.setattr(service_members.socket, "gethostname", lambda x=name: x)
        assert gce(url).task_id == numbers.get(name)


def test_a_group_without_a_running_machine(serve) -> None:
    with pytest.raises(ValueError, match="'trainers' of project 'proj' in zone"):
        gce(serve(compute_api([]))).cluster_spec()


# --- TPUs ---------------------------------------------------------------------


@pytest.fixture
def no_tpu(monkeypatch):
    """No variable, no device and no machine of Compute Engine."""
    for name in ("WORKER_HOSTNAMES", "WORKER_ID", "NAME"):
        monkeypatch.delenv(f"TPU_{name}", raising=False)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr(cloud_tpu, "DEVICES", ("/dev/no-accel0",))
    monkeypatch.setattr(cloud_tpu, "_PRODUCT", Path("/there-is-none"))
    return monkeypatch


@pytest.fixture
def metadata(serve, no_tpu) -> Callable[..., None]:
    """Starts a metadata server with attributes; "_" stands for "-"."""

    def start(**attributes: str) -> None:
        def answer(path: str, query: dict, body: dict) -> tuple[int, object]:
            assert query["Metadata-Flavor"] == ["Google"]
            key = path.removeprefix("/computeMetadata/v1/instance/attributes/")
            found = attributes.get(key.replace("-", "_"))
            return (404, "not found") if found is None else (200, found)

        no_tpu.setenv("GCE_METADATA_HOST", serve(answer).removeprefix("http://"))

    return start


@pytest.mark.parametrize(
    "endpoints", ["10.0.0.2,10.0.0.3", "unknown:unknown:10.0.0.2,x:y:10.0.0.3"]
)
def test_the_metadata_of_a_machine_of_a_tpu_slice(metadata, endpoints) -> None:
    metadata(worker_network_endpoints=endpoints, agent_worker_number="1")
    resolver = cluster.TPUClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.2:8470", "10.0.0.3:8470"]
    }
    assert resolver.master() == "grpc://10.0.0.3:8470"


def test_a_machine_of_compute_engine_without_a_tpu(metadata) -> None:
    metadata()
    with pytest.raises(ValueError, match="its metadata server names no TPU workers"):
        cluster.TPUClusterResolver()


def test_a_metadata_server_that_does_not_answer(no_tpu) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        no_tpu.setenv("GCE_METADATA_HOST", address)
        with pytest.raises(ValueError, match=f"{address}.*does not answer"):
            cluster.TPUClusterResolver()


def tpu_api(state: str) -> Answer:
    def answer(path: str, query: dict, body: dict) -> tuple[int, object]:
        assert path == "/v2/projects/proj/locations/us-west4-a/nodes/big"
        ends = [{"ipAddress": f"10.0.0.{i}", "port": 8471} for i in (2, 3)]
        found = {"name": path.removeprefix("/v2/"), "state": state}
        return 200, {**found, "networkEndpoints": ends}

    return answer


def test_a_tpu_by_its_name(serve, no_tpu) -> None:
    place = {"zone": "us-west4-a", "project": "proj"}
    service = google_client("tpu", "v2", serve(tpu_api("READY")))
    resolver = cluster.TPUClusterResolver("big", **place, service=service)
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.2:8471", "10.0.0.3:8471"]
    }
    service = google_client("tpu", "v2", serve(tpu_api("CREATING")))
    with pytest.raises(ValueError, match="'CREATING', not 'READY'"):
        cluster.TPUClusterResolver("big", **place, service=service)
    with pytest.raises(ValueError, match="project=None"):
        cluster.TPUClusterResolver("big", zone="us-west4-a")


def test_a_tpu_by_its_address_and_the_local_one(no_tpu, tmp_path) -> None:
    resolver = cluster.TPUClusterResolver("grpc://10.0.0.2:8470")
    assert resolver.master() == "grpc://10.0.0.2:8470"
    with pytest.raises(ValueError, match="No TPU was found for local"):
        cluster.TPUClusterResolver("local")
    device = tmp_path / "accel0"
    device.touch()
    no_tpu.setattr(cloud_tpu, "DEVICES", (str(device),))
    for name in ("local", "", None):
        resolver = cluster.TPUClusterResolver(name)
        assert resolver.cluster_spec().as_dict() == {"worker": ["localhost:8470"]}


def test_the_variables_of_a_machine_of_a_tpu_slice(no_tpu) -> None:
    no_tpu.setenv("TPU_WORKER_HOSTNAMES", "t0,t1")
    no_tpu.setenv("TPU_WORKER_ID", "1")
    resolver = cluster.TPUClusterResolver()
    assert resolver.master() == "grpc://t1:8470"
    assert not resolver.is_chief
    no_tpu.setenv("TPU_WORKER_ID", "2")
    with pytest.raises(ValueError, match=r"number '2'.*\['t0', 't1'\]"):
        cluster.TPUClusterResolver()


def test_without_a_tpu_it_says_what_was_looked_for(no_tpu) -> None:
    with pytest.raises(ValueError, match=r"my-tpu.*TPU_WORKER_HOSTNAMES.*no-accel0"):
        cluster.TPUClusterResolver("my-tpu")


# --- Without the clients ------------------------------------------------------


PACKAGES = {
    "kubernetes": "kubernetes",
    "googleapiclient": "google-api-python-client",
}


@pytest.mark.parametrize(
    "module, make",
    [
        ("kubernetes", cluster.KubernetesClusterResolver),
        ("googleapiclient", lambda: cluster.GCEClusterResolver("p", "z", "g", 1)),
        (
            "googleapiclient",
            lambda: cluster.TPUClusterResolver("big", zone="z", project="p"),
        ),
    ],
    ids=["kubernetes", "gce", "tpu"],
)
def test_without_its_client_a_resolver_says_what_to_install(
    monkeypatch, module, make
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {PACKAGES[module]}"):
        make()


def test_any_object_with_the_clients_methods_will_do() -> None:
    item = SimpleNamespace(
        metadata=SimpleNamespace(name="t-0"),
        spec=SimpleNamespace(hostname=None),
        status=SimpleNamespace(pod_ip="10.0.0.1", phase="Running"),
    )
    pods = SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(items=[item])
    )
    resolver = cluster.KubernetesClusterResolver(override_client=pods)
    assert resolver.cluster_spec().num_tasks("worker") == 1
