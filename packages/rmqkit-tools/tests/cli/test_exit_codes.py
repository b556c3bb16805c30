"""An error is one line with the remedy, and an exit code for its kind. `--debug` shows the traceback."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import msgspec
import pytest

from rmqkit import errors
from rmqkit.__main__ import main
from rmqkit.errors import ExitCode, exit_code
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.topics import TopicList
from rmqkit.remoting.tls import ServerTls, ServerTlsSettings, TlsMode
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.cli.answering import SECONDS_MAX, body, refusal, saying, serving
from tests.patience import as_users_have_it
from tests.ports import HOST, silent_port

TOPICS = body(msgspec.json.encode(TopicList(["Orders", "Payments"])))
LIST = {RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: TOPICS}


@pytest.fixture
def rmq(monkeypatch, capsys):
    """Runs the command line; returns its exit code, what it printed and what it said on stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.delenv("NAMESRV_ADDR", raising=False)
        monkeypatch.setattr(sys, "argv", ["rmq", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def said(error: str) -> str:
    """The one line of an error."""
    (line,) = error.splitlines()
    assert line.startswith("rmq: ")
    return line.removeprefix("rmq: ")


def test_done(rmq):
    with serving(LIST) as address:
        assert rmq("topic", "list", "-n", address) == (ExitCode.DONE, "Orders\nPayments\n", "")


def test_no_server(rmq):
    with silent_port() as port:
        address = f"{HOST}:{port}"
        code, _, error = rmq("topic", "list", "-n", address)
    assert code == ExitCode.NO_SERVER
    assert f"cannot connect to {address}" in said(error)
    assert "check whether it runs" in said(error)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b""])
def test_something_else_listens_there(rmq, greeting):
    with saying(greeting) as address:
        code, _, error = rmq("topic", "list", "-n", address)
    assert code == ExitCode.NO_SERVER
    assert f"{address} does not speak RocketMQ's protocol" in said(error)
    assert "check the port" in said(error)


def test_no_answer(rmq):
    with saying(None) as address, as_users_have_it():
        code, _, error = rmq("topic", "list", "-n", address, "--timeout", "50")
    assert code == ExitCode.TIMED_OUT
    assert "did not answer GET_ALL_TOPIC_LIST_FROM_NAMESERVER (206) within 50 ms" in said(error)


def test_the_next_name_server_is_asked(rmq):
    with saying(b"") as silent, serving(LIST) as address:
        assert rmq("topic", "list", "-n", f"{silent};{address}")[0] == ExitCode.DONE


@pytest.mark.parametrize(
    ("answered", "code"),
    [
        (ResponseCode.NO_PERMISSION, ExitCode.REFUSED),
        (ResponseCode.FLOW_CONTROL, ExitCode.REFUSED),
        (ResponseCode.SYSTEM_ERROR, ExitCode.FAILED),
        (ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, ExitCode.UNKNOWN),
    ],
)
def test_a_refusal(rmq, answered, code):
    with serving({RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: refusal(answered, "not you")}) as address:
        ended, _, error = rmq("topic", "list", "-n", address)
    assert ended == code
    assert said(error).startswith(f"{address} answered with code {int(answered)}: not you")


def test_an_unknown_topic_is_answered_with_a_near_one(rmq):
    route = {RequestCode.GET_ROUTEINFO_BY_TOPIC: refusal(ResponseCode.TOPIC_NOT_EXIST, "No topic route info")}
    with serving(LIST | route) as address:
        code, _, error = rmq("topic", "route", "Order", "-n", address)
    assert code == ExitCode.UNKNOWN
    assert said(error) == f"name server {address} has no topic Order: did you mean Orders?"


def test_a_cluster_without_a_broker_is_named(rmq):
    nobody = body(b'{"brokerAddrTable":{},"clusterAddrTable":{}}')
    with serving({RequestCode.GET_BROKER_CLUSTER_INFO: nobody}) as address:
        code, _, error = rmq("topic", "create", "Orders", "-n", address)
    assert code == ExitCode.USAGE
    assert said(error) == f"name server {address} knows no broker: start one, or wait until it is registered"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if OPENSSL is None:
        pytest.skip(REASON)
    return make_certificate(tmp_path_factory.mktemp("certificates"), "server")


class TestTls:
    def enforcing(self, certificate) -> ServerTls:
        mode, chain, key = TlsMode.ENFORCING, certificate.certificate, certificate.key
        return ServerTls(ServerTlsSettings(mode=mode, certificate=chain, key=key))

    def test_both_encrypt(self, rmq, certificate):
        with serving(LIST, self.enforcing(certificate)) as address:
            asked = ("topic", "list", "-n", address, "--tls-ca", certificate.certificate)
            assert rmq(*asked)[0] == ExitCode.DONE

    def test_only_the_server_encrypts(self, rmq, certificate):
        with serving(LIST, self.enforcing(certificate)) as address:
            code, _, error = rmq("topic", "list", "-n", address)
        assert code == ExitCode.TLS
        assert f"{address}: it wants TLS; use --tls" in said(error)

    def test_only_the_client_encrypts(self, rmq):
        with serving(LIST) as address:
            code, _, error = rmq("topic", "list", "-n", address, "--tls")
        warning, line = error.splitlines()
        assert code == ExitCode.TLS
        assert "encrypts and verifies nothing" in warning
        assert f"{address}: it does not encrypt; leave TLS out" in said(line)

    def test_a_server_that_is_not_trusted(self, rmq, certificate, tmp_path):
        other = make_certificate(tmp_path, "other").certificate
        with serving(LIST, self.enforcing(certificate)) as address:
            code, _, error = rmq("topic", "list", "-n", address, "--tls-ca", other)
        assert code == ExitCode.TLS
        assert "CERTIFICATE_VERIFY_FAILED; trust its signer" in said(error)

    def test_a_certificate_that_is_not_there(self, rmq, tmp_path):
        code, _, error = rmq("topic", "list", "--tls-ca", str(tmp_path / "missing.pem"))
        assert code == ExitCode.USAGE
        assert "missing.pem cannot be used" in said(error)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["topics"], "topic"),
        (["broker", "statis"], "status"),
        (["broker", "--port", "0", "status"], "write rmq broker status"),
        (["admin", "topicLst"], "topicList"),
        (["topic", "lst"], "list"),
        (["topic", "list", "--jsn"], "--json"),
        (["topic", "route"], "give TOPIC, or -t TOPIC"),
        (["topic", "route", "A", "-t", "B"], "unexpected extra argument: A"),
        (["topic", "create", "T", "-r", "many"], "many"),
        (["topic", "create", "T", "-p", "7"], "permission 7 must be"),
        (["topic", "list", "-n", "nowhere"], "host:port"),
        (["send", "T", "x", "-n", "a..b:9876"], "host:port"),
        (["broker", "-n", "nowhere", "--port", "0", "--store", "/nowhere"], "namesrvAddr=nowhere: address"),
        (["broker", "--host", "a..b", "--port", "0", "--store", "/nowhere"], "cannot listen on a..b: "),
        (["store", "rebuild", "/nowhere"], "give --queues, --index or both"),
    ],
)
def test_what_cannot_be_understood(rmq, arguments, hint):
    code, printed, error = rmq(*arguments)
    assert (code, printed) == (ExitCode.USAGE, "")
    assert hint in said(error)


@pytest.mark.parametrize("words", [[], ["admin"], ["topic"], ["topic", "route"], ["send"], ["explain"]])
def test_help_has_a_short_name_everywhere(rmq, words):
    code, printed, _ = rmq(*words, "-h")
    assert (code, " ".join(["Usage: rmq", *words]) in printed) == (ExitCode.DONE, True)


def test_a_noun_alone_is_a_question_for_help(rmq):
    code, printed, error = rmq("topic")
    assert (code, error) == (ExitCode.USAGE, "")
    assert "Usage: rmq topic" in printed


@pytest.mark.parametrize("command", [["send"], ["tail"], ["topic", "route"]])
def test_a_name_that_is_not_utf8(rmq, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    with serving(LIST) as address:
        code, _, error = rmq(*command, os.fsdecode(b"\xff"), "-n", address)
    assert code == ExitCode.USAGE
    assert "'\\udcff' cannot be written in utf-8" in said(error)


def test_a_name_that_comes_as_bytes_which_are_not_utf8():
    command = ["topic", "route"]
    with serving(LIST) as address:
        asked = [sys.executable, "-m", "rmqkit", *command, b"\xff", "-n", address]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, input="x")
    assert done.returncode == ExitCode.USAGE
    assert "'\\udcff' cannot be written in utf-8" in said(done.stderr)


def test_closed_standard_streams_are_of_nothing(tmp_path):
    script = f"exec {sys.executable} -m rmqkit store stat {tmp_path}/none <&- >&-"
    done = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX, check=False)
    assert (done.returncode, "is not a store" in said(done.stderr)) == (ExitCode.FAILED, True)
    look = "import os, rmqkit.__main__ as it; it._open_standard_streams(); print(os.readlink('/proc/self/fd/0'))"
    script = f'exec {sys.executable} -c "{look}" <&-'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.stdout == "/dev/null\n"


def test_lines_of_a_closed_stdin_are_none():
    with serving({**LIST, RequestCode.GET_ROUTEINFO_BY_TOPIC: refusal(17, "no route")}) as address:
        script = f"exec {sys.executable} -m rmqkit send T -n {address} <&-"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert (done.returncode, done.stdout[:11], done.stderr) == (ExitCode.DONE, "sent 0 to T", "")


def test_an_interrupt_before_a_command_minds_it(monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rmqkit.__main__._run", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_libraries_say_nothing_beside_the_line():
    with saying(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        asked = [sys.executable, "-m", "rmqkit", "topic", "list", "-n", address]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == ExitCode.NO_SERVER
    assert "does not speak RocketMQ's protocol" in said(done.stderr)


def test_what_reads_the_output_may_end_early():
    with serving(LIST) as address:
        command = f"set -o pipefail; {sys.executable} -m rmqkit topic list -n {address} --watch 0.1 | head -1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Orders\n", "")


def test_output_that_cannot_be_written():
    with serving(LIST) as address, open("/dev/full", "w") as full:
        asked = [sys.executable, "-m", "rmqkit", "topic", "list", "-n", address]
        done = subprocess.run(asked, stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == ExitCode.FAILED
    assert "No space left on device" in said(done.stderr)


def test_the_other_kind_of_server_listens_there(rmq):
    with serving({}) as address:
        code, _, error = rmq("topic", "list", "-n", address)
    assert code == ExitCode.NO_SERVER
    assert "the other kind of server" in said(error)


@pytest.mark.parametrize(
    ("remark", "remedy"),
    [
        ("Can not update config in black list.", "change it in the settings file of the server"),
        ("username cannot be null.", "give an access key and its secret"),
        ("check signature failed.", "the secret is not the one of that access key"),
        ("User:anna is not found.", "correct the access key"),
        ("no", "grant the permission"),
    ],
)
def test_a_refusal_says_what_it_is_for(rmq, remark, remedy):
    with serving({RequestCode.UPDATE_BROKER_CONFIG: refusal(16, remark)}) as address:
        code, _, error = rmq("broker", "config-set", "listenPort", "1", "-b", address)
    assert code == ExitCode.REFUSED
    assert said(error).endswith(f"code 16: {remark}; {said(error).rpartition('; ')[2]}")
    assert remedy in error


def test_a_refusal_that_says_what_to_do_is_not_added_to():
    remark = "10.1.2.3:5 may not change this server: ask at 127.0.0.1"
    assert str(errors.PeerRefused(16, remark, "a:1")) == f"a:1 answered with code 16: {remark}"


def test_debug_shows_where_it_happened(rmq):
    code, _, error = rmq("--debug", "topic", "list", "-n", "nowhere")
    assert code == ExitCode.USAGE
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("rmq: name servers 'nowhere'")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConnectionLost("127.0.0.1:1", "it was reset"), ExitCode.NO_SERVER),
        (errors.RequestTimedOut("127.0.0.1:1", 10, 3000), ExitCode.TIMED_OUT),
        (errors.NoNameServer([errors.RequestTimedOut("127.0.0.1:1", 105, 3000)]), ExitCode.TIMED_OUT),
        (
            errors.NoNameServer([errors.RequestTimedOut("a:1", 105, 3000), errors.ConnectFailed("b:1", "refused")]),
            ExitCode.NO_SERVER,
        ),
        (errors.SendFailed("T", ["a"], errors.PeerRefused(16, None, "a:1")), ExitCode.REFUSED),
        (errors.SendFailed("T", ["a"], OSError("no")), ExitCode.FAILED),
        (errors.NoRoute("no broker accepts messages for topic T"), ExitCode.UNKNOWN),
        (errors.StoreLocked("/store"), ExitCode.FAILED),
    ],
)
def test_other_errors_have_codes_as_well(error, code):
    assert exit_code(error) == code
