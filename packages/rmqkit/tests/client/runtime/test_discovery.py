"""The discovery of name servers, and the choice among them. Source: behaviour.md §7.1; remoting.md §9.2."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime import runtime as runtime_module
from rmqkit.client.runtime.routes import address_url, discover
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings, ProducerSettings, name_server_list
from rmqkit.errors import NoRoute
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import Message
from tests.client.inside import runtime_of
from tests.client.peers import Cluster, until

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC


@contextlib.contextmanager
def web_server(answer):
    """One that answers every GET with what a function says; yields its address and the paths it was asked for."""
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            text = answer()
            self.send_response(200 if text else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"name_server_domain": "ns.example"}, "http://ns.example:8080/rocketmq/nsaddr"),
        ({"name_server_domain": "ns.example:80"}, "http://ns.example:80/rocketmq/nsaddr"),
        ({"name_server_domain": "a", "unit_name": "u"}, "http://a:8080/rocketmq/nsaddr-u?nofix=1"),
        ({"name_server_domain": "a", "name_server_subgroup": "g"}, "http://a:8080/rocketmq/g"),
    ],
)
def test_the_address_is_the_one_java_clients_ask(settings, url):
    assert address_url(ClientSettings(**settings)) == url


def test_a_web_server_is_asked_only_when_nothing_else_names_a_name_server():
    assert name_server_list("a:1", {}, domain="d") == ["a:1"]
    assert name_server_list(None, {"NAMESRV_ADDR": "b:1"}, domain="d") == ["b:1"]
    assert name_server_list(None, {}, domain="d") == []


@pytest.mark.real_time
async def test_a_client_sends_through_the_name_servers_that_a_web_server_names(monkeypatch):
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    async with Cluster() as cluster:
        cluster.topic("T")
        with web_server(lambda: f"{cluster.namesrv};127.0.0.1:1\n") as (domain, paths):
            settings = ProducerSettings(name_server_domain=domain, unit_name="u")
            async with Producer("PG", settings=settings) as producer:
                await producer.send(Message(topic="T", body=b"1"))
        assert set(paths) == {"/rocketmq/nsaddr-u?nofix=1"}


@pytest.mark.real_time
async def test_name_servers_that_move_are_found_again(monkeypatch):
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    monkeypatch.setattr(runtime_module, "_DISCOVERY_INTERVAL_MS", 10.0)
    async with Cluster() as old, Cluster() as new:
        old.topic("T")
        new.topic("T")
        new.topic("U")
        named = [old.namesrv]
        with web_server(lambda: named[0]) as (domain, _):
            async with Producer("PG", settings=ProducerSettings(name_server_domain=domain)) as producer:
                await producer.send(Message(topic="T", body=b"1"))
                named[0] = new.namesrv
                await until(lambda: runtime_of(producer).name_servers == [new.namesrv], "the new name server")
                await producer.send(Message(topic="U", body=b"1"))
        assert [one["b"] for one in new.broker.asked(RequestCode.SEND_MESSAGE_V2)] == ["U"]


@pytest.mark.parametrize("text", ["", "nothing like an address"])
@pytest.mark.real_time
async def test_an_answer_without_addresses_is_reported_with_its_url(text, monkeypatch):
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with web_server(lambda: text) as (domain, _):
        settings = ProducerSettings(name_server_domain=domain)
        with pytest.raises(
            NoRoute, match=f"http://{domain}/rocketmq/nsaddr does not return addresses of name servers: "
        ):
            await discover(settings)
        with pytest.raises(NoRoute):
            await Producer("PG", settings=settings).start()


@pytest.mark.real_time
async def test_the_next_name_server_is_asked_when_one_does_not_answer_and_then_kept():
    async with Cluster() as cluster:
        cluster.topic("T")
        cluster.topic("U")
        async with Producer("PG", f"127.0.0.1:1;{cluster.namesrv};127.0.0.1:2") as producer:
            for topic in "TU":
                await producer.send(Message(topic=topic, body=b"1"))
            chosen = runtime_of(producer).routes._name_servers
            assert chosen.addresses[chosen._chosen % 3] == cluster.namesrv
        assert {one["topic"] for one in cluster.name_server.asked(ROUTE)} >= {"T", "U"}


@pytest.mark.real_time
async def test_when_no_name_server_answers_every_one_is_named():
    with pytest.raises(NoRoute) as caught:
        await Producer("PG", "127.0.0.1:1;127.0.0.1:2").start()
    assert "127.0.0.1:1" in str(caught.value)
    assert "127.0.0.1:2" in str(caught.value)


@pytest.mark.real_time
async def test_a_runtime_that_did_not_find_its_name_servers_can_be_started_again():
    async with Cluster() as cluster:
        cluster.topic("T")
        texts = ["", cluster.namesrv]
        with web_server(lambda: texts.pop(0)) as (domain, _):
            runtime = ClientRuntime(settings=ClientSettings(name_server_domain=domain))
            runtime.routes.watch("T", "G")
            with pytest.raises(NoRoute):
                await runtime.start()
            await runtime.start()
            await until(lambda: runtime.routes.subscribe_queues("T"), "a route")
            await runtime.close()
