"""Hooks of other packages: decoders of bodies and pages, passed to the console or found by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from markupsafe import Markup

from rmqkit.admin import Admin
from rmqkit.console import Console, OwnPage, hooks, own_page
from rmqkit.console.request.request import Ask
from rmqkit.console.views.message import body_of
from rmqkit.errors import SettingsError
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.system import threads
from tests.admin.things import send
from tests.client.messages import received
from tests.console.asgi import served


def decode_body(topic: str, message: ReceivedMessage) -> str | None:
    if topic != "Orders":
        return None
    if message.body == b"\xff":
        raise ValueError("not an order")
    return f"order <{message.body.hex()}>"


async def stock(ask: Ask) -> Any:
    brokers = [one.row.broker_name for one in ask.snapshot.brokers]
    return own_page(STOCK, Markup("<p>{} brokers</p>").format(len(brokers)), {"brokers": brokers})


STOCK = OwnPage(path="stock", title="Stock", view=stock, live_s=30)
PROTOBUF = SimpleNamespace(
    decode_body=lambda topic, message: json_format.MessageToJson(Struct.FromString(message.body), indent=None)
)
OURS = SimpleNamespace(decode_body=decode_body, routes=lambda console: [STOCK])


async def test_a_decoder_makes_a_text_of_a_body(tmp_path: Path) -> None:
    async with served(tmp_path, hooks=[OURS]) as (both, _, browser), Admin(both.namesrv_address) as admin:
        broker = both.broker.context.settings.broker_name
        for topic in ("Orders", "Others"):
            await admin.topics.create(topic, read_queues=1, write_queues=1)
        await send(admin, Message(topic="Orders", body=b"\x01\x02"), Message(topic="Orders", body=b"\xff"))
        await send(admin, Message(topic="Others", body=b"plain"))
        found = await browser.json(f"/local/topics/Orders/at/{broker}/0/0")
        assert found["body"] == {"form": "decoded", "text": "order <0102>", "bytes": 2, "isCut": False}
        assert "order &lt;0102&gt;" in (await browser.get(f"/local/topics/Orders/at/{broker}/0/0")).text
        failed = await browser.json(f"/local/topics/Orders/at/{broker}/0/1")
        assert failed["body"]["text"] == "the decoder of this body failed: ValueError: not an order"
        rows = (await browser.json("/local/topics/Orders/messages"))["messages"]
        assert rows[1]["body"] == "order <0102>"
        assert (await browser.json(f"/local/topics/Others/at/{broker}/0/0"))["body"]["text"] == "plain"
        whole = await browser.get(f"/local/topics/Orders/at/{broker}/0/0?download=1")
        assert whole.body == b"\x01\x02"


async def test_a_decoder_of_protobuf_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [EntryPoint("bodies", f"{__name__}:PROTOBUF", hooks.GROUP)]
    monkeypatch.setattr(hooks, "entry_points", lambda *, group: points)
    order = Struct()
    order.update({"item": "lamp"})
    async with served(tmp_path) as (both, _, browser), Admin(both.namesrv_address) as admin:
        await admin.topics.create("Orders", read_queues=1, write_queues=1)
        await send(
            admin, Message(topic="Orders", body=order.SerializeToString()), Message(topic="Orders", body=b"\xff")
        )
        at = f"/local/topics/Orders/at/{both.broker.context.settings.broker_name}/0"
        assert (await browser.json(f"{at}/0"))["body"]["text"] == '{"item": "lamp"}'
        assert "failed: DecodeError" in (await browser.json(f"{at}/1"))["body"]["text"]
        rows = (await browser.json("/local/topics/Orders/messages"))["messages"]
        assert rows[1]["body"] == '{"item": "lamp"}'


async def test_a_decoder_that_hangs_is_not_called_again() -> None:
    end, calls = threads.Event(), list[bytes]()

    def hang(topic: str, message: ReceivedMessage) -> str:
        calls.append(message.body)
        if message.body == b"b":
            end.wait()
        return "text"

    decoders = hooks.Hooks(None, [SimpleNamespace(decode_body=hang)])
    messages = [received(number, body) for number, body in enumerate([b"a", b"b", b"c"])]
    try:
        first = await decoders.decode(messages)
        assert first[:1] == ["text"]
        assert first[1:] == ["not decoded: no time was left for this body"] * 2
        assert all("did not end in 1 s" in (text or "") for text in await decoders.decode(messages))
        assert calls == [b"a", b"b"]
    finally:
        end.set()


@pytest.mark.parametrize(
    ("body", "form", "text"),
    [
        (b"\x82\xa5order\x11\xa4item\xa4lamp", "MessagePack", '{\n  "order": 17,\n  "item": "lamp"\n}'),
        (b"\x92\x01\xc0", "MessagePack", "[\n  1,\n  null\n]"),
        (b"\x82\xa5order\x11", "hex", "000000  82 a5 6f 72 64 65 72 11"),
        (b"\x92\x01\xc0!", "hex", "000000  92 01 c0 21"),
        (b"\xc4\x01x", "hex", "000000  c4 01 78"),
        (b"\x81\x90\x01", "hex", "000000  81 90 01"),
        (b"\x81\xa1t\xd6\x05abcd", "hex", "000000  81 a1 74 d6 05 61 62 63 64"),
        (b"\x91" * 5_000 + b"\x01", "hex", "000000  91 91"),
        (b'{"a":1}', "json", '{\n  "a": 1\n}'),
    ],
)
def test_bodies_without_a_decoder(body: bytes, form: str, text: str) -> None:
    shown = body_of(body)
    assert (shown.form, shown.text.startswith(text)) == (form, True), shown.text


async def test_a_body_that_is_too_large_is_not_decoded() -> None:
    decoders = hooks.Hooks(None, [SimpleNamespace(decode_body=lambda topic, message: "text" * (2 << 20))])
    (large, small) = await decoders.decode([received(0, bytes(hooks.DECODE_BYTES_MAX + 1)), received(1, b"x")])
    assert large == "not decoded: the body has 4,194,305 bytes, above 4,194,304"
    assert len(small or "") == hooks.DECODE_BYTES_MAX


async def test_a_page_of_a_hook_is_in_the_frame_and_in_the_navigation(tmp_path: Path) -> None:
    async with served(tmp_path, hooks=[OURS]) as (both, _, browser):
        page = await browser.get("/local/own/stock")
        assert page.status == 200
        assert "<p>1 brokers</p>" in page.text
        assert 'data-events="/events?path=%2Flocal%2Fown%2Fstock"' in page.text
        assert (await browser.json("/local/own/stock"))["brokers"] == [both.broker.context.settings.broker_name]
        assert '<a href="/local/own/stock">Stock</a>' in (await browser.get("/local/topics")).text
        assert (await browser.get("/local/own/other")).status == 404


def test_hooks_of_installed_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("broken", "no_such_package", hooks.GROUP),
        EntryPoint("ours", f"{__name__}:OURS", hooks.GROUP),
    ]
    monkeypatch.setattr(hooks, "entry_points", lambda *, group: [one for one in points if one.group == group])
    assert hooks.installed() == [OURS]
    assert Console("127.0.0.1:1").hooks.pages == [STOCK]


@pytest.mark.parametrize("path", ["", "a/b", "Größe", "a?b"])
def test_a_page_whose_path_cannot_be_one_is_refused(path: str) -> None:
    hook = SimpleNamespace(routes=lambda console: [OwnPage(path=path, title="T", view=stock)])
    with pytest.raises(SettingsError, match="must have letters"):
        Console("127.0.0.1:1", hooks=[hook])


def test_two_hooks_cannot_have_one_page() -> None:
    with pytest.raises(SettingsError, match="two hooks of the console have a page stock"):
        Console("127.0.0.1:1", hooks=[OURS, OURS])
