"""The tools of a Java peer: a JDK, Apache's jars, our compiled probes; found, fetched and compiled once.

| Part | Where it comes from |
|---|---|
| java, javac >= 17 | `JAVA_HOME`, else the path |
| the Apache jars | Maven, once per version, into the cache |
| `java/src/interop/*.java`, our probes | javac, once per version and content, into the cache |
| the classes of a broker, loaded | a broker's Java machine, once per version and content, into the cache |

The cache is `.cache/interop` in the repository; `RMQKIT_INTEROP_CACHE` names another one, to share it between
checkouts. A missing part raises `Unavailable` with the reason, which the fixtures show as a skip.
"""

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

JAVA_FOLDER = Path(__file__).parent / "java"
POM = JAVA_FOLDER / "pom.xml"
LOWEST_JAVA = 17

# The broker and its Netty use JDK internals that Java 17 closes by default.
OPENED_PACKAGES = ("java.lang", "java.nio", "java.util", "jdk.internal.misc", "jdk.internal.ref", "sun.nio.ch")
LOGGING_OFF = '<configuration><root level="OFF"/></configuration>'


class Unavailable(Exception):
    """A missing tool or download. The text is the reason to show."""


@dataclass(frozen=True, slots=True)
class ApacheKit:
    """One RocketMQ version, ready to run: the Java program, Apache's jars, our compiled probes.

    Attributes:
        classes: the jar of our probes.
        archive: the class data archive; programs start without it if it is missing.
        is_short_lived: True if programs run too briefly to profit from the second compiler; this halves their time.
    """

    version: str
    java: Path
    lib: Path
    classes: Path
    archive: Path | None = None
    is_short_lived: bool = True

    def jvm(self, main: str, arguments: Sequence[object], *, heap_mb: int, work_dir: Path) -> list[str]:
        """Return the command line of a Java program that logs nothing and writes only below `work_dir`."""
        logging = work_dir / "logging-off.xml"
        logging.write_text(LOGGING_OFF)
        return [
            str(self.java),
            f"-Xmx{heap_mb}m",
            "-XX:+UseSerialGC",
            *(["-XX:TieredStopAtLevel=1"] if self.is_short_lived else []),
            *(
                [f"-XX:SharedArchiveFile={self.archive}", "-Xlog:disable"]
                if self.is_short_lived and self.archive
                else []
            ),
            "-XX:MaxDirectMemorySize=1g",  # each storing thread of a broker holds 4 MiB
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED_PACKAGES),
            *(f"--add-exports=java.base/{package}=ALL-UNNAMED" for package in ("jdk.internal.ref", "sun.nio.ch")),
            f"-Duser.home={work_dir}",
            f"-Drmq.logback.configurationFile={logging}",
            f"-Drocketmq.client.logRoot={work_dir}",
            "-Drocketmq.client.logLevel=ERROR",
            f"-Drocketmq.client.localOffsetStoreDir={work_dir}",
            # A client assigns its queues every 20 s. A client that starts in between would wait that long.
            "-Drocketmq.client.rebalance.waitInterval=500",
            "-Dcom.rocketmq.remoting.client.connect.timeout=60000",
            "-cp",
            f"{self.classes}{os.pathsep}{self.lib}/*",
            main,
            *map(str, arguments),
        ]


def default_version(pom: Path = POM) -> str:
    """Return the version in ``RMQKIT_APACHE``, or else in a POM, without an argument in `java/pom.xml`."""
    if chosen := os.environ.get("RMQKIT_APACHE"):
        return chosen
    element = ElementTree.parse(pom).find(".//{*}rocketmq.version")
    assert element is not None, f"{pom} has no rocketmq.version property"
    assert element.text, f"rocketmq.version is empty in {pom}"
    return element.text


def prepare(version: str) -> ApacheKit:
    """Return all parts of a Java peer of this version, fetched and compiled on first use. Raises Unavailable."""
    java = find_java()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    lib = cache / f"lib-{version}"
    classes = cache / f"probes-{version}-{sources_digest()}.jar"
    archive = classes.with_suffix(".jsa")
    with (cache / f"lock-{version}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of a run wait, and then find all parts
        if not lib.is_dir():
            fetch_jars(version, lib)
        if not classes.exists():
            compile_probes(java, lib, classes)
        if not archive.exists():
            archive_classes(ApacheKit(version=version, java=java, lib=lib, classes=classes), archive)
    return ApacheKit(version=version, java=java, lib=lib, classes=classes, archive=archive)


def cache_folder() -> Path:
    shared = os.environ.get("RMQKIT_INTEROP_CACHE")
    return Path(shared) if shared else Path(__file__).parents[2] / ".cache" / "interop"


@functools.cache
def find_java() -> Path:
    """Return the Java program, after one check of its version. Raises Unavailable: it is missing or too old."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if found is None:
        where = f"JAVA_HOME={home}" if home else "the path"
        raise Unavailable(f"no java in {where}: needs a JDK >= {LOWEST_JAVA}")
    text = subprocess.run([found, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', text)
    if version is None or int(version[1]) < LOWEST_JAVA:
        raise Unavailable(f"{found} is version {version[1] if version else 'unknown'}: needs a JDK >= {LOWEST_JAVA}")
    return Path(found)


def fetch_jars(version: str, lib: Path, pom: Path = POM) -> None:
    """Let Maven copy the jars of a POM. The folder appears only when it is complete. Raises Unavailable."""
    maven = shutil.which("mvn")
    if maven is None:
        raise Unavailable(f"no mvn on the path and no jars in {lib}: needs Maven once, to fetch RocketMQ {version}")
    with tempfile.TemporaryDirectory(dir=lib.parent, prefix="fetching-") as folder:
        command = [maven, "-q", "-B", "-f", str(pom), f"-Drocketmq.version={version}"]
        command += ["dependency:copy-dependencies", f"-DoutputDirectory={folder}/lib"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stdout.splitlines() if "ERROR" in line] or ["no message"]
            what = f"RocketMQ {version}" if pom == POM else version
            raise Unavailable(f"mvn could not fetch {what}: {errors[0][:300]}")
        move_into_place(Path(folder, "lib"), lib)


def sources_digest() -> str:
    digest = hashlib.sha256()
    for source in java_sources():
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def java_sources() -> list[Path]:
    return sorted(JAVA_FOLDER.glob("src/**/*.java"))


def compile_probes(java: Path, lib: Path, classes: Path) -> None:
    """Compile `java/src` against one version's jars. Raises Unavailable without a compiler."""
    javac = java.resolve().with_name("javac")
    if not javac.exists():
        raise Unavailable(f"{java} is a runtime without javac: needs a JDK >= {LOWEST_JAVA}")
    with tempfile.TemporaryDirectory(dir=classes.parent, prefix="compiling-") as folder:
        command: list[str | Path] = [
            javac,
            "-nowarn",
            "-encoding",
            "UTF-8",
            "-d",
            f"{folder}/classes",
            "-cp",
            f"{lib}/*",
        ]
        done = subprocess.run([*command, *java_sources()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"javac failed on {JAVA_FOLDER}:\n{done.stdout}{done.stderr}"
        with zipfile.ZipFile(f"{folder}/probes.jar", "w") as jar:
            for path in sorted(Path(folder, "classes").rglob("*.class")):
                jar.write(path, path.relative_to(f"{folder}/classes"))
        Path(folder, "probes.jar").rename(classes)


def archive_classes(kit: ApacheKit, archive: Path) -> None:
    """Let a broker write its loaded classes and lambda code into an archive. Later JVMs start with it: this saves a
    third of the time of a broker or probe. Without ``jcmd`` there is no archive.
    """
    jcmd = kit.java.resolve().with_name("jcmd")
    if not jcmd.exists():
        return
    from tests.interop.apache import BROKER_CONF, BROKER_HEAP_MB, HOST, READY_SECONDS, start_apache
    from tests.ports import free_ports

    with tempfile.TemporaryDirectory(dir=archive.parent, prefix="archiving-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _, port, ha_port = free_ports()
        conf = {
            **BROKER_CONF,
            "listenPort": port,
            "bindAddress": HOST,
            "haListenPort": ha_port,
            "namesrvAddr": f"{HOST}:1",  # no name server is needed to become ready
            "storePathRootDir": folder / "store",
            "storePathCommitLog": folder / "store/commitlog",
        }
        main, options = "org.apache.rocketmq.broker.BrokerStartup", ["-XX:+RecordDynamicDumpInfo"]
        with start_apache(kit, "broker", main, conf, BROKER_HEAP_MB, folder, options) as broker:
            broker.wait_ready("boot success", READY_SECONDS)
            dump = [jcmd, str(broker.pid), "VM.cds", "dynamic_dump", folder / "classes.jsa"]
            subprocess.run(dump, stdout=subprocess.DEVNULL, check=True, timeout=READY_SECONDS)
        (folder / "classes.jsa").rename(archive)


def move_into_place(made: Path, wanted: Path) -> None:
    """Rename a folder. If another process was faster, use its folder."""
    try:
        made.rename(wanted)
    except OSError:
        if not wanted.is_dir():
            raise
