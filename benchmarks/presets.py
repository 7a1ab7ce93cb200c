"""Presets that are loaded into shards: the memory of each process, and the speed.

A decoder with random weights is written as Hugging Face writes it (`safetensors` in
several files and their index), and as Keras does: a `.keras` file, a preset folder with
`model.weights.h5`, and one with `model.weights.json` and its files. Each is loaded
under `ModelParallelStrategy("fsdp")` into four shards: on Torch by four processes with
a device each; on JAX and TensorFlow by one process with all of them, and `safetensors`
by four processes, too.

Memory is what a process has allocated (`RssAnon`), above what it had before it made the
model: at most while it makes variables, while it loads, and afterwards. Pages of files
that a process maps, as `safetensors` does, are not among it: the system drops them when
it needs memory. What the allocator of the C library keeps of freed memory is not
either: it is told to map all that has a megabyte. TensorFlow's own allocator keeps what
it has once had, for later tensors; "in use" is without that.

    python benchmarks/presets.py
    python benchmarks/presets.py --speed --layers 4

With `--speed` it is the speed of `safetensors` that is measured, also of one process on
Torch, which loads onto one device: seconds of the values, from the first one that a
variable gets, beside those in which `safetensors` alone reads all tensors, in
rounds that also have those of Keras without a strategy, on one device. Seconds of the
processor are those of all processes together; of `safetensors` alone, of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measuring import BACKENDS, Results, names, options_parser, ratio, run_script
from page import write_page
from tables import markdown_table

SHARDS = 4
# Bytes of the model by the number of its layers: 28 have 4.0 GB.
WIDTH, INNER, VOCABULARY, HEADS = 2048, 8192, 32000, 16
FILE_BYTES = 10**9
FORMATS = {
    "safetensors": "safetensors",
    "h5": "`model.weights.h5`",
    "sharded": "`model.weights.json`",
    "keras": "`.keras`",
}
SECONDS = 1500
_TIMES = ("load", "values", "keras", "alone")


# --- Files --------------------------------------------------------------------


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names that Hugging Face gives the weights of a Llama, and their shapes."""
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (WIDTH,)
        for name in "qkvo":
            yield f"{layer}.self_attn.{name}_proj.weight", (WIDTH, WIDTH)
        yield f"{layer}.mlp.gate_proj.weight", (INNER, WIDTH)
        yield f"{layer}.mlp.up_proj.weight", (INNER, WIDTH)
        yield f"{layer}.mlp.down_proj.weight", (WIDTH, INNER)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCABULARY, WIDTH)


def random_numbers(name: str, shape: tuple[int, ...]) -> Any:
    """Numbers of bfloat16 between 1/128 and 1/64, of both signs."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(zlib.crc32(name.encode()))
    bits = rng.integers(0, 2**16, shape, dtype=np.uint16)
    return ((bits & 0x807F) | 0x3C00).view(ml_dtypes.bfloat16)


def write_safetensors(folder: Path, layers: int) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    where: dict[str, str] = {}
    waiting: dict[str, Any] = {}

    def write() -> None:
        file = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(waiting, folder / file)
        where.update(dict.fromkeys(waiting, file))
        waiting.clear()

    for name, shape in tensors(layers):
        waiting[name] = random_numbers(name, shape)
        if sum(value.nbytes for value in waiting.values()) > FILE_BYTES:
            write()
    write()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_others(folder: Path) -> None:
    """The same weights in Keras's formats."""
    import keras_strategies as ks

    devices = [f"cpu:{i}" for i in range(SHARDS)]
    with ks.ModelParallelStrategy("fsdp", devices).scope():
        model = loaded(folder, "safetensors")
    model.save_to_preset(str(folder / "h5"), max_shard_size=None)
    size = sum(file.stat().st_size for file in (folder / "safetensors").iterdir())
    model.save_to_preset(str(folder / "sharded"), max_shard_size=size / 3 / 2**30)
    model.save(folder / "keras.keras")


def loaded(folder: Path, kind: str) -> Any:
    import keras
    import keras_hub

    if kind == "keras":
        return keras.saving.load_model(folder / "keras.keras")
    backbone = keras_hub.models.Llama3Backbone
    return backbone.from_preset(str(folder / kind), dtype="bfloat16")


# --- In the processes that load -----------------------------------------------


def strategy_here() -> Any:
    """Four shards in all; one device of a process without others on Torch."""
    import keras

    import keras_strategies as ks

    if "TF_CONFIG" in os.environ:
        return ks.ModelParallelStrategy("fsdp", ["cpu:0"])
    if keras.backend.backend() == "torch":
        return ks.OneDeviceStrategy("cpu:0")
    return ks.ModelParallelStrategy("fsdp", [f"cpu:{i}" for i in range(SHARDS)])


def check(model: Any, kind: str) -> None:
    import keras

    name = "model.layers.1.mlp.down_proj.weight"
    expected = random_numbers(name, (WIDTH, INNER)).T
    layer = model.get_layer("transformer_layer_1")
    kernel = keras.ops.convert_to_numpy(layer._feedforward_output_dense.kernel)
    if not (kernel == expected).all():
        raise AssertionError(f"{kind}: another value of {name}.")


def work(folder: Path, kind: str) -> None:
    """Loads a file, and prints a line of JSON with the memory of this process."""
    # Of the tests.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multi_worker"))
    import keras_hub  # noqa: F401  What it allocates is not of the model.
    from memory_peaks import allocated_by

    strategy = strategy_here()
    found: list[Any] = []

    def load() -> None:
        with strategy.scope():
            found.append(loaded(folder, kind))

    memory = allocated_by(load)
    stays = memory.after - memory.before
    used = given_out()
    found.clear()
    # Without the thread that samples the memory.
    seconds, _ = seconds_of(load)
    [model] = found
    check(model, kind)
    print(
        json.dumps(
            {
                "before": memory.before,
                "making": memory.making - memory.before,
                "peak": memory.loading - memory.before,
                "stays": stays,
                "used": stays if used is None else used,
                "shards": sum(strategy.describe(model).totals.values()),
                "seconds": seconds,
            }
        )
    )


def time_loads(folder: Path, rounds: int) -> None:
    """Prints the seconds of loads, of values, and of the files alone, as JSON."""
    import keras_hub  # noqa: F401

    strategy = strategy_here()
    times: dict[str, list[list[float]]] = {what: [] for what in _TIMES}
    for _ in range(rounds + 1):
        gc.collect()
        times["alone"].append(seconds_of(lambda: read_alone(folder / "safetensors")))
        _, first, end = clocks_of_load(contextlib.nullcontext, folder)
        times["keras"].append(_between(first, end))
        start, first, end = clocks_of_load(strategy.scope, folder)
        times["load"].append(_between(start, end))
        times["values"].append(_between(first, end))
    # The first one finds nothing in the cache of the system.
    print(json.dumps({name: found[1:] for name, found in times.items()}))


def clocks_of_load(scope: Callable[[], Any], folder: Path) -> list[tuple[float, float]]:
    """Clocks at the begin of a load, at the first value that is read, at its end.

    Each has the seconds of the wall and of the processor.
    """
    import keras
    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    port = SafetensorLoader.port_weight
    found: list[tuple[float, float]] = []

    def ported(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(found) == 1:
            found.append(_clock())
        return port(self, *args, **kwargs)

    SafetensorLoader.port_weight = ported
    try:
        found.append(_clock())
        with scope():
            model = loaded(folder, "safetensors")
        if keras.backend.backend() == "jax":  # Copies to devices are asynchronous.
            for variable in model.variables:
                variable.value.block_until_ready()
        found.append(_clock())
    finally:
        SafetensorLoader.port_weight = port
    check(model, "safetensors")
    return found


def _clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _between(start: tuple[float, float], end: tuple[float, float]) -> list[float]:
    return [round(b - a, 2) for a, b in zip(start, end, strict=True)]


def seconds_of(function: Callable[[], object]) -> list[float]:
    """Seconds of a call, and those of the processor."""
    start = _clock()
    function()
    return _between(start, _clock())


def read_alone(folder: Path) -> None:
    """Reads all tensors by `safetensors`."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  A file is no dict.
                file.get_tensor(name)


def given_out() -> int | None:
    """Bytes that TensorFlow's allocator has given out; None where it does not count."""
    from memory_peaks import tensorflow_counts_memory

    if os.environ["KERAS_BACKEND"] != "tensorflow" or not tensorflow_counts_memory():
        return None
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


# --- In the process that a person starts --------------------------------------


def run(backend: str, processes: int, *arguments: str) -> list[Any]:
    """What each process has found."""
    from two_workers import ranks

    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    if processes == 1:
        return [run_script(__file__, *arguments, backend=backend, timeout=SECONDS)]
    command = [sys.executable, __file__, *arguments]
    return ranks(command, processes, backend, SECONDS)


def table(results: dict[str, Any]) -> str:
    """Memory of the process that needs most, as a Markdown table."""
    header = ["backend, processes", "file", "shards of a process", "in use", "stays"]
    header += ["while loading", "above what stays", "while making", "largest tensor"]
    header += ["time"]
    rows = []
    for name, found in results.items():
        backend, processes, kind = name.split(", ")
        most = max(found["processes"], key=lambda each: each["peak"])
        above = max(each["peak"] - each["stays"] for each in found["processes"])
        sizes = most["shards"], most["used"], most["stays"], most["peak"], above
        sizes = *sizes, most["making"], found["largest"]
        rows.append(
            [
                f"{backend}, {processes}",
                FORMATS[kind],
                *(f"{size / 1e6:.0f} MB" for size in sizes),
                f"{most['seconds']:.0f} s",
            ]
        )
    return markdown_table(header, rows)


def speed_table(results: dict[str, Any]) -> str:
    """Values of a model beside its files alone, as a Markdown table."""
    header = ["backend, processes", "files", "entire load", "its values"]
    header += ["`safetensors` alone, in as many processes", "alone / values"]
    header += ["values by Keras without a strategy", "that / values"]
    header += ["values, processor", "alone, processor", "alone / values"]
    rows = []
    for name, found in results.items():
        times = found["times"]

        def seconds(
            what: str, clock: int, of: Callable[[Iterator[float]], float]
        ) -> list[float]:
            columns = zip(*(each[what] for each in times), strict=True)  # noqa: B023
            return [of(pair[clock] for pair in column) for column in columns]

        # A round ends with its last process.
        load, values, plain, alone = (seconds(what, 0, max) for what in _TIMES)
        used, read = seconds("values", 1, sum), seconds("alone", 1, median)
        rows.append(
            [
                name,
                f"{found['bytes'] / 1e9:.1f} GB",
                *(f"{median(each):.1f} s" for each in (load, values, alone)),
                ratio(alone, values),
                f"{median(plain):.1f} s",
                ratio(plain, values),
                *(f"{median(each):.1f} s" for each in (used, read)),
                ratio(read, used),
            ]
        )
    return markdown_table(header, rows)


def measure_speed(
    cases: Sequence[tuple[str, str]], folder: Path, rounds: int, output: Path
) -> None:
    results = Results(output / "presets_speed.json")
    files = (folder / "safetensors").glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    given = ["--worker", "speed", "--folder", str(folder), "--rounds", str(rounds)]
    for backend, processes in cases:
        name = f"{backend}, {processes}"
        print(name, file=sys.stderr)
        times = run(backend, int(processes), *given)
        results.put(name, {"bytes": size, "times": times})
    print(speed_table(results.values))


def measure_memory(
    backends: list[str], formats: list[str], folder: Path, output: Path
) -> None:
    results = Results(output / "presets.json")
    for backend in backends:
        for kind in formats:
            alone = [] if backend == "torch" else [1]
            together = backend == "torch" or kind == "safetensors"
            for processes in (*alone, *([SHARDS] if together else [])):
                name = f"{backend}, {processes}, {kind}"
                print(name, file=sys.stderr)
                given = ["--worker", kind, "--folder", str(folder)]
                found = run(backend, processes, *given)
                largest = 2 * VOCABULARY * WIDTH
                results.put(name, {"largest": largest, "processes": found})
    print(table(results.values))


def main() -> None:
    parser = options_parser(__doc__, BACKENDS)
    parser.add_argument("--formats", type=names, default=list(FORMATS))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, help="with files of an earlier run")
    parser.add_argument("--speed", action="store_true", help="in place of the memory")
    both = ["1", str(SHARDS)]
    parser.add_argument("--processes", type=names, default=both, help="of --speed")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == "write":
        write_others(options.folder)
        print("null")
        return
    if options.worker == "speed":
        time_loads(options.folder, options.rounds)
        return
    if options.worker:
        work(options.folder, options.worker)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="presets"))
    try:
        if not (folder / "safetensors").exists():
            write_safetensors(folder / "safetensors", options.layers)
            if not options.speed:
                arguments = ["--worker", "write", "--folder", str(folder)]
                run_script(__file__, *arguments, backend="jax", timeout=SECONDS)
        if options.speed:
            cases = list(itertools.product(options.backends, options.processes))
            measure_speed(cases, folder, options.rounds, options.output)
        else:
            measure_memory(options.backends, options.formats, folder, options.output)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    write_page(options.output)


if __name__ == "__main__":
    main()
