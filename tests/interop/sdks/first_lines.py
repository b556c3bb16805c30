"""The first lines that `docs/how-to/grpc-clients.md` shows of each SDK, as programs."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.docs.blocks import blocks_of
from tests.interop.go_and_node import BUILD_SECONDS, Program, complete, find_tool
from tests.interop.sdks.programs import GO_BUILD, GO_ENV, HERE

PAGE = HERE.parents[2] / "docs" / "how-to" / "grpc-clients.md"
SHOWN_ENDPOINT = "127.0.0.1:8081"
# A word of the code block, its file, and the code around it.
AROUND: Mapping[str, tuple[str, str, str]] = {
    "java": (
        "ClientServiceProvider",
        "First.java",
        """import org.apache.rocketmq.client.apis.*;
import org.apache.rocketmq.client.apis.producer.*;
class First {
    public static void main(String[] arguments) throws Exception {
%s
        Runtime.getRuntime().halt(0);
    }
}
""",
    ),
    "go": (
        "golang.NewProducer",
        "main.go",
        """package main
import (
	"context"
	"log"
	"os"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)
func main() {
%s
}
""",
    ),
    "node": ("require('rocketmq-client-nodejs')", "first.js", "(async () => {\n%s\nprocess.exit(0);\n})();\n"),
    "python": ("from rocketmq import", "first.py", "%s\nimport os\nos._exit(0)\n"),
}


def first_lines(language: str, endpoint: str) -> str:
    """Return the page's code block as a whole program for this endpoint."""
    word, _, around = AROUND[language]
    (block,) = (block for block in blocks_of(PAGE) if word in block.text)
    assert SHOWN_ENDPOINT in block.text, f"{block.place} names another endpoint"
    return around % block.text.replace(SHOWN_ENDPOINT, endpoint)


def command_of(language: str, program: Program, endpoint: str, home: Path) -> Sequence[str | Path]:
    """Return the command that runs the first lines, with the SDK of `program`."""
    file = home / AROUND[language][1]
    file.write_text(first_lines(language, endpoint))
    if language != "go":
        return [*program.command[:-1], file]
    for pinned in (HERE / "go").glob("go.*"):
        shutil.copy(pinned, home)
    done = complete([find_tool("go"), *GO_BUILD, "-o", "first", "."], home, GO_ENV, BUILD_SECONDS)
    assert done.returncode == 0, f"go build failed:\n{done.stderr}"
    return [home / "first"]
