"""Machines of another make, without leave to change this one: full and read-only disks, no network.

A command that runs in namespaces of its own sees mounts that nobody else sees, gone when it ends.
"""

import shutil
import subprocess
from functools import cache

import pytest


@cache
def _may_be_made() -> bool:
    tool = shutil.which("unshare")
    if tool is None:
        return False
    asked = [tool, "-rmn", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(asked, check=False, capture_output=True).returncode == 0


def within(*setup: str, network: bool = True) -> list[str]:
    """Return what to put before a command: a shell does `setup` first, where mounts are its own.

    Skips the test where the system does not allow it.
    """
    if not _may_be_made():
        pytest.skip("needs namespaces that may mount (unshare -rmn), which are not allowed here")
    kinds = "-rm" if network else "-rmn"
    script = "\n".join([*setup, 'exec "$@"'])
    return [str(shutil.which("unshare")), kinds, "/bin/sh", "-ec", script, "sh"]
