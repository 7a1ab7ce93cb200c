"""Build sdist and wheel, and train with the wheel in an empty environment.

    python tests/packaging/try_wheel.py jax      # or torch, tensorflow
    python tests/packaging/try_wheel.py tensorflow tensorflow-cpu

The wheel is built from the sdist. The environment gets it with the extra of one
backend, or with the requirement that is named in place of the extra, and nothing else:
a requirement that is missing, or a file that is not in the wheel, is an error here.
Versions are those of constraints.txt. It needs the network; `test_wheel.py` runs it
each night.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import importlib.util
import keras, numpy as np, keras_strategies as ks

for name in ks.__all__:
    getattr(ks, name)
others = {"jax", "torch", "tensorflow"} - {keras.backend.backend()}
found = [name for name in others if importlib.util.find_spec(name)]
assert not found, f"other frameworks are installed: {found}"
package = ks.__file__.rpartition("/")[0]
assert "site-packages" in package, package
for name in ("py.typed", "__init__.pyi", "tools/troubleshooting.md"):
    open(f"{package}/{name}").close()

import importlib.metadata

about = importlib.metadata.metadata("keras-strategies")
assert about["Version"] == ks.__version__
urls = dict(each.split(", ") for each in about.get_all("Project-URL", []))
assert urls["Source"] == "https://example.org/project", urls
text = about.get_payload()
links = text.count("](") - text.count("](https://") - text.count("](#")
assert text.startswith("# keras_strategies") and not links, text

strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((7, 8), "float32")
losses = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0).history["loss"]
assert losses[1] < losses[0], losses
print(f"{keras.backend.backend()}: {ks.__version__} of {package}, losses {losses}")
"""


def environment(folder: Path, *requirements: str) -> Path:
    """The Python of a new environment with only these requirements."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pins = ["-c", ROOT / "constraints.txt"]
    install = [python, "-m", "pip", "install", "-q", *pins, *requirements]
    subprocess.run(install, check=True)
    return python


def main() -> None:
    backend, *instead = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        builder = environment(place / "builder", "build")
        build = [builder, "-P", "-m", "build", "--outdir", place / "dist", ROOT]
        address = {"KS_PROJECT_URL": "https://example.org/project"}
        subprocess.run(build, cwd=place, env=os.environ | address, check=True)
        (wheel,) = (place / "dist").glob("*.whl")
        package = [str(wheel), *instead] if instead else [f"{wheel}[{backend}]"]
        python = environment(place / "empty", *package)
        variables = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
        subprocess.run(
            # -P: this checkout is not on the path.
            [python, "-P", "-c", SCRIPT],
            env=os.environ | variables,
            cwd=place,
            check=True,
        )


if __name__ == "__main__":
    main()
