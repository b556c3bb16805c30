"""Compile the readers in Java against the jars of the installed PySpark: ``python build.py`` writes the jar.

Only a JDK is needed: nothing is downloaded. The jar is a part of the package and its wheel. Where it is missing, the
sources in Python read instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
JAR = HERE.parent / "src/rmqkit/spark/rmqkit-spark.jar"
_RELEASE = "17"  # the oldest Java of Spark 4
_DATE = (1980, 1, 1, 0, 0, 0)  # equal sources give an equal jar


def build() -> str | None:
    """Write the jar. Return the reason if there is none."""
    javac = shutil.which("javac", path=os.pathsep.join([f"{os.environ.get('JAVA_HOME', '')}/bin", os.environ["PATH"]]))
    spec = importlib.util.find_spec("pyspark")
    if javac is None or spec is None or spec.origin is None:
        return f"no {'javac' if javac is None else 'pyspark'}"
    with tempfile.TemporaryDirectory() as classes:
        options = [
            "-Werror",
            "-Xlint:all,-classfile,-deprecation,-path,-processing",
            "--release",
            _RELEASE,
            "-encoding",
            "UTF-8",
        ]
        jars = str(Path(spec.origin).with_name("jars") / "*")
        sources = sorted(map(str, HERE.rglob("*.java")))
        subprocess.run([javac, *options, "-cp", jars, "-d", classes, *sources], check=True)
        made = JAR.with_suffix(".new")
        with zipfile.ZipFile(made, "w") as jar:
            for folder, pattern in ((Path(classes), "*.class"), (HERE, "META-INF/**/*.*")):
                for file in sorted(folder.rglob(pattern)):
                    entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _DATE)
                    jar.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
        made.replace(JAR)
    return None


if __name__ == "__main__":
    if (reason := build()) is not None:
        print(f"env: {reason}, so there are no readers in Java: Spark reads with Python")
