"""Signed requests and who is let in (remoting.md §3.3)."""

from __future__ import annotations

import pytest

from rmqkit import Message, PeerRefused, Producer, ProducerSettings, SendFailed
from rmqkit.errors import SettingsError
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, Credentials, inner_credentials
from rmqkit.standalone import Standalone

USERS = AuthenticationSettings(
    enabled=True,
    initial_user='{"username":"anna","password":"secret12"}',
    inner_credentials='{"accessKey":"broker","secretKey":"other123"}',
)


class Peer:
    """A connection, as far as it is asked."""

    user = None


def test_the_vector_of_a_real_client():
    command = request(105, TopicRequest("T"))
    Credentials(access_key="ak", secret_key="sk12345").sign(command)
    assert command.fields == {"topic": "T", "AccessKey": "ak", "Signature": "nd9T7YPZHofi0bGc7HK96Fbl1Aw="}


def test_signing_twice_is_signing_once():
    command = request(105, TopicRequest("T"), b"body")
    credentials = Credentials(access_key="ak", secret_key="sk12345", security_token="token")
    credentials.sign(command)
    once = dict(command.fields)
    credentials.sign(command)
    assert command.fields == once


@pytest.mark.parametrize(
    ("credentials", "remark"),
    [
        (None, "username cannot be null."),
        (Credentials(access_key="bert", secret_key="x"), "User:bert is not found."),
        (Credentials(access_key="anna", secret_key="wrong"), "check signature failed."),
        (Credentials(access_key="anna", secret_key="secret12"), None),
        (Credentials(access_key="broker", secret_key="other123"), None),
    ],
)
def test_who_is_let_in(credentials, remark):
    command = request(105, TopicRequest("T"), b"body")
    if credentials is not None:
        credentials.sign(command)
    assert Authentication.of(USERS).refusal(Peer(), command) == remark


def test_a_changed_field_or_body_breaks_the_signature():
    for change in ({"topic": "U"}, {"added": "x"}, None):
        command = request(105, TopicRequest("T"), b"body")
        Credentials(access_key="anna", secret_key="secret12").sign(command)
        if change is None:
            command.body = b"other"
        else:
            command.fields = {**command.fields, **change}
        assert Authentication.of(USERS).refusal(Peer(), command) == "check signature failed."


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (AuthenticationSettings(enabled=True), "needs initAuthenticationUser"),
        (AuthenticationSettings(enabled=True, initial_user="{"), "initAuthenticationUser cannot be read"),
        (AuthenticationSettings(inner_credentials='{"accessKey":1}'), "innerClientAuthenticationCredentials cannot be"),
    ],
)
def test_settings_that_cannot_be_used(settings, text):
    with pytest.raises(SettingsError, match=text):
        Authentication.of(settings) or inner_credentials(settings.inner_credentials)


async def test_a_broker_takes_messages_of_a_known_user_only(tmp_path):
    async def send(namesrv, **settings):
        async with Producer("p", namesrv, settings=ProducerSettings(retries=0, **settings)) as producer:
            return (await producer.send(Message(topic="T", body=b"x"))).status.value

    async with Standalone(tmp_path / "store", authentication=USERS) as standalone:
        assert await send(standalone.namesrv_address, auth=Credentials("anna", "secret12")) == "SEND_OK"
        with pytest.raises((SendFailed, PeerRefused), match=r"check signature failed"):
            await send(standalone.namesrv_address, auth=Credentials(access_key="anna", secret_key="guess"))
