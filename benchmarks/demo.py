"""`make demo`: speed and accuracy of the digits example, and distance to one device.

One run of `examples/demo.py` on each backend, on two virtual CPU replicas.
"""

from __future__ import annotations

import sys
from typing import Any

from measuring import BACKENDS, RESULTS, Results, options_parser, run_script
from page import write_page
from tables import markdown_table

DEMO = RESULTS.parents[1] / "examples" / "demo.py"


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "replicas", "samples/s", "final loss", "accuracy"]
    header += ["largest difference to one device"]
    rows = []
    for backend, found in results.items():
        cells = [backend, str(found["replicas"]), f"{found['samples_per_second']:,.0f}"]
        cells += [f"{found[key]:.4f}" for key in ("loss", "accuracy")]
        rows.append([*cells, f"{found['difference']:.1e}"])
    return markdown_table(header, rows)


def main() -> None:
    options = options_parser(__doc__, BACKENDS).parse_args()
    results = Results(options.output / "demo.json")
    for backend in options.backends:
        print(f"training on {backend} ...", file=sys.stderr, flush=True)
        results.put(backend, run_script(DEMO, "--backend", backend, backend=backend))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
