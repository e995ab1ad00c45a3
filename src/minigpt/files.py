"""Files that are whole or not there: how the package writes all that it writes in one piece."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to that takes the place of `path` when the block ends well.

    Until then, and when the block raises, whatever stood at `path` stays as it was. Folders on the
    way are made. Raises OSError where the disk is full or the folder may not be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The same folder, so that the rename stays on one disk; a name of its own for each writer, so
    # that several processes may prepare the same file at once.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
