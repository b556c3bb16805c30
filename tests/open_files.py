"""Which files this process has open: what others do meanwhile, or the collector, does not count."""

from pathlib import Path


def open_files(root: Path) -> list[Path]:
    """What open descriptors lead to below a directory, deleted files included."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            path = descriptor.readlink()
        except FileNotFoundError:  # the descriptor that listed them
            continue
        if path.is_relative_to(root):
            found.append(path)
    return found
