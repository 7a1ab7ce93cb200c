"""A filesystem without free space."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def full_disk(folder: Path, files: list[str]) -> Iterator[str]:
    """Fills the filesystem of a folder while the block runs.

    Where this process may mount, an empty filesystem of 1 MB covers the folder, and is
    filled. Elsewhere, as in most containers, the named files are links to `/dev/full`,
    for which the kernel reports the same error; a file that is removed in the block can
    be written after that.

    Args:
        folder: which folder.
        files: names of files that will be written there.

    Yields:
        str, where the full filesystem is mounted.
    """
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if is_mounted:
        try:
            with contextlib.suppress(OSError), (folder / "ballast").open("wb") as file:
                file.write(bytes(2 << 20))
            yield str(folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    for name in files:
        (folder / name).symlink_to("/dev/full")
    try:
        yield "/"
    finally:
        for name in files:
            (folder / name).unlink(missing_ok=True)
