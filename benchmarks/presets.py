"""Presets that are loaded into shards: the memory of each process while it loads.

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
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import BACKENDS, Results, names, options_parser, run_script
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


def work(folder: Path, kind: str) -> None:
    """Loads a file, and prints a line of JSON with the memory of this process."""
    import keras

    import keras_strategies as ks

    # Of the tests.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multi_worker"))
    import keras_hub  # noqa: F401  What it allocates is not of the model.
    from memory_peaks import allocated_by

    is_alone = "TF_CONFIG" not in os.environ
    devices = [f"cpu:{i}" for i in range(SHARDS if is_alone else 1)]
    strategy = ks.ModelParallelStrategy("fsdp", devices)
    found: list[Any] = []

    def load() -> None:
        with strategy.scope():
            found.append(loaded(folder, kind))

    alone = read_alone(folder / kind) if kind == "safetensors" else None
    memory = allocated_by(load)
    stays = memory.after - memory.before
    used = given_out()
    found.clear()
    # Without the thread that samples the memory.
    start = time.perf_counter()
    cpu_seconds = processor_time_of_values(load)
    seconds = time.perf_counter() - start
    [model] = found
    own = sum(strategy.describe(model).totals.values())
    name = "model.layers.1.mlp.down_proj.weight"
    expected = random_numbers(name, (WIDTH, INNER)).T
    layer = model.get_layer("transformer_layer_1")
    kernel = keras.ops.convert_to_numpy(layer._feedforward_output_dense.kernel)
    if not (kernel == expected).all():
        raise AssertionError(f"{kind}: another value of {name}.")
    print(
        json.dumps(
            {
                "before": memory.before,
                "making": memory.making - memory.before,
                "peak": memory.loading - memory.before,
                "stays": stays,
                "used": stays if used is None else used,
                "shards": own,
                "seconds": round(seconds, 1),
                "cpu_seconds": round(cpu_seconds, 2),
                "alone": alone,
            }
        )
    )


def processor_time_of_values(load: Callable[[], None]) -> float:
    """Seconds of the processor in which a made model gets its values.

    They begin with the first value that is assigned.
    """
    import keras

    kind: Any = keras.Variable
    assign = kind.assign
    start: list[float] = []

    def assigned(self: Any, value: Any) -> Any:
        if not start:
            start.append(time.process_time())
        return assign(self, value)

    kind.assign = assigned
    try:
        load()
    finally:
        kind.assign = assign
    return time.process_time() - start[0]


def read_alone(folder: Path) -> list[float]:
    """Seconds, and those of the processor, in which `safetensors` reads all tensors."""
    from safetensors import safe_open

    start, used = time.perf_counter(), time.process_time()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  A file is no dict.
                file.get_tensor(name)
    found = time.perf_counter() - start, time.process_time() - used
    return [round(seconds, 2) for seconds in found]


def given_out() -> int | None:
    """Bytes that TensorFlow's allocator has given out; None where it does not count."""
    from memory_peaks import tensorflow_counts_memory

    if os.environ["KERAS_BACKEND"] != "tensorflow" or not tensorflow_counts_memory():
        return None
    import tensorflow as tf

    return int(tf.config.experimental.get_memory_info("CPU:0")["current"])


# --- In the process that a person starts --------------------------------------


def run(backend: str, folder: Path, kind: str, processes: int) -> list[Any]:
    """What each process has found."""
    from two_workers import ranks

    arguments = ["--worker", kind, "--folder", str(folder)]
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    if processes == 1:
        return [run_script(__file__, *arguments, backend=backend, timeout=SECONDS)]
    command = [sys.executable, __file__, *arguments]
    return ranks(command, processes, backend, SECONDS)


def table(results: dict[str, Any]) -> str:
    """Memory of the process that needs most, as a Markdown table."""
    header = ["backend, processes", "file", "shards of a process", "in use", "stays"]
    header += ["while loading", "above what stays", "while making", "largest tensor"]
    header += ["time", "of the processor", "`safetensors` alone"]
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
                *processor_times(found["processes"]),
            ]
        )
    return markdown_table(header, rows)


def processor_times(processes: list[dict[str, Any]]) -> tuple[str, str]:
    """Of all processes that get their values, and of `safetensors` alone, once.

    With the part of the former that is the latter.
    """
    if "cpu_seconds" not in processes[0]:
        return "", ""
    used = sum(each["cpu_seconds"] for each in processes)
    if processes[0]["alone"] is None:
        return f"{used:.1f} s", ""
    _, alone = processes[0]["alone"]
    return f"{used:.1f} s", f"{alone:.1f} s, {alone / used:.0%}"


def main() -> None:
    parser = options_parser(__doc__, BACKENDS)
    parser.add_argument("--formats", type=names, default=list(FORMATS))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, help="with files of an earlier run")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == "write":
        write_others(options.folder)
        print("null")
        return
    if options.worker:
        work(options.folder, options.worker)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="presets"))
    results = Results(options.output / "presets.json")
    try:
        if not (folder / "safetensors").exists():
            write_safetensors(folder / "safetensors", options.layers)
            arguments = ["--worker", "write", "--folder", str(folder)]
            run_script(__file__, *arguments, backend="jax", timeout=SECONDS)
        for backend in options.backends:
            for kind in options.formats:
                alone = [] if backend == "torch" else [1]
                together = backend == "torch" or kind == "safetensors"
                for processes in (*alone, *([SHARDS] if together else [])):
                    name = f"{backend}, {processes}, {kind}"
                    print(name, file=sys.stderr)
                    found = run(backend, folder, kind, processes)
                    largest = 2 * VOCABULARY * WIDTH
                    results.put(name, {"largest": largest, "processes": found})
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
