"""The compiled schema is what the .proto files say, and lives beside another copy in the same process."""

import subprocess
import sys
from importlib.resources import files

from rmqkit.proxy.schema import messages

SCHEMA = files("rmqkit.proxy") / "schema"


def test_the_compiled_schema_is_that_of_the_proto_files(tmp_path):
    compiled = tmp_path / "messages.binpb"
    arguments = ["-I", str(SCHEMA), "--include_imports", "--descriptor_set_out", str(compiled)]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", *arguments, "apache/rocketmq/v2/service.proto"]
    subprocess.run(protoc, check=True)
    assert compiled.read_bytes() == (SCHEMA / "messages.binpb").read_bytes()


def test_the_service_has_its_methods():
    by_name = {method.name: method for method in messages.methods()}
    assert len(by_name) == 17
    assert by_name["SendMessage"].path == "/apache.rocketmq.v2.MessagingService/SendMessage"
    streams = {name for name, method in by_name.items() if method.streams_responses}
    assert streams == {"ReceiveMessage", "PullMessage", "Telemetry"}
    assert [name for name, method in by_name.items() if method.streams_requests] == ["Telemetry"]


def test_another_copy_of_the_schema_may_be_in_the_default_pool(tmp_path):
    program = """
from google.protobuf import descriptor_pb2, descriptor_pool
from rmqkit.proxy.schema import messages
from importlib.resources import files
data = (files("rmqkit.proxy") / "schema/messages.binpb").read_bytes()
for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
    if file.name.startswith("apache/"):
        file.name = file.name.replace("apache/rocketmq/v2/", "")  # as the official SDK registers them
        file.dependency[:] = [name.replace("apache/rocketmq/v2/", "") for name in file.dependency]
        descriptor_pool.Default().Add(file)
descriptor_pool.Default().FindMessageTypeByName("apache.rocketmq.v2.Message")
print(messages.message_class("Message")(body=b"x").body)
"""
    program = "import google.protobuf.timestamp_pb2, google.protobuf.duration_pb2\n" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "b'x'\n"
