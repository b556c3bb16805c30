"""A store on a tmpfs that is full: a start says so and lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

_PROGRAM = """
import os, sys
from pathlib import Path
from rmqkit.errors import StoreError
from tests.store.stores import message, opened, put_all, small_settings

folder = Path(sys.argv[1])
settings = small_settings(commit_log_file_bytes=1 << 20)
with opened(folder / "store", settings) as store:
    put_all(store, message(body=bytes(4096 - 91 - len("TopicTest"))))
    assert store.max_physical_offset == 4096, "recovery looks at a page that has no memory yet"
file = os.open(folder / "other", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(file, bytes(4096))
except OSError:
    os.close(file)
try:
    with opened(folder / "store", settings) as store:
        print("open", store.max_offset("TopicTest", 0))
except StoreError as error:
    print(error)
(folder / "other").unlink(missing_ok=True)
with opened(folder / "store", settings) as store:
    print("messages", store.max_offset("TopicTest", 0))
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and unshare")
def test_a_full_tmpfs_is_refused_and_ends_no_process(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=3m tmpfs {disk} || exit 77; exec {sys.executable} -c "$1" {disk}'
    command = ["unshare", "-m", "sh", "-c", script, "sh", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    refused, after = done.stdout.splitlines()
    assert f"{disk} is on a tmpfs with 0 bytes free" in refused.replace("/store", "")
    assert f"mount -o remount,size=... {disk})" in refused
    assert after == "messages 1"
