"""A filesystem without free space."""

from __future__ import annotations

import contextlib
import errno
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[tuple[str, int]]:
    """Fills the filesystem of a folder while the block runs.

    Where this process may mount, an empty filesystem of 1 MB covers the folder, and is
    filled. Elsewhere, as in most containers, no file of this process can have more
    than 100 bytes, for which the kernel reports another error.

    Args:
        folder: the folder.

    Yields:
        pair of a str, where the full filesystem is mounted, and of the error's number.
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
            yield str(folder), errno.ENOSPC
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield "/", errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
