"""The open files of this process, below one directory: other files, which threads or the collector open and close, do
not appear.
"""

from pathlib import Path


def open_files(root: Path) -> list[Path]:
    """Return the paths of the open descriptors below a directory, deleted files included."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            path = descriptor.readlink()
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
        if path.is_relative_to(root):
            found.append(path)
    return found
