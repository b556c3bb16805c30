"""The rights that requests require, as a literal: a changed row of the catalog must not change a right by accident.

A row is: actions | fields with flags | position of a message: actions on its topic, or ``send``, or ``body``.
``tests/interop/test_authorization.py`` compares the rights with Apache's broker. Source: behaviour.md §9.8.
"""

from __future__ import annotations

from rmqkit.protocol.catalog import CATALOG
from tests.tree.test_codes import OF_APACHE

RIGHTS = {
    10: "Pub | topic | send",
    11: "Sub | topic! consumerGroup!",
    12: "Sub Get | topic=",
    14: "Sub Get | topic~ consumerGroup!",
    15: "Sub Update | topic~ consumerGroup!",
    17: "Create | topic",
    29: "Get | topic",
    30: "Get | topic",
    31: "Get | topic",
    32: "Get | topic",
    33: "Get | topic | offset: Sub Get",
    34: "Sub |  | body",
    35: "Sub | consumerGroup-",
    36: "Sub | group! | offset: Sub",
    37: "Pub | topic- | commitLogOffset: Pub",
    38: "Sub Get | consumerGroup!",
    41: "Sub |  | body",
    42: "Sub |  | body",
    202: "Get | topic",
    203: "Get | consumerGroup",
    204: "Get",
    207: "Delete | groupName",
    208: "Get | consumerGroup topic topicList;",
    215: "Delete | topic",
    222: "Update | group topic",
    223: "Get | topic group",
    300: "Get | topic",
    303: "Get | topic group",
    307: "Get | consumerGroup",
    308: "Get | filterGroups, compareGroup topic",
    309: "Sub | consumerGroup topic | msgId: Sub Get",
    310: "Pub | b | send",
    314: "Update | destGroup topic",
    315: "Get",
    317: "Get",
    320: "Pub | b | send",
    321: "Get | topic consumerGroup",
    323: "Update | topic | msgId: Update",
    324: "Pub | topic | send",
    325: "Pub | b | send",
    328: "Get",
    343: "Get | group",
    345: "Get | group topic",
    351: "Get | topic",
    352: "Get | group",
    353: "Update | group topic",
    361: "Sub | topic! consumerGroup!",
    370: "Pub | topic=",
    905: "Update",
    906: "Update",
    908: "Update",
    3001: "Update",
    3002: "Update",
    3003: "Update",
    3004: "Get",
    3005: "Get",
    3006: "Update",
    3007: "Update",
    3008: "Update",
    3009: "Get",
    3010: "Get",
    5002: "Delete |  | body",
    5003: "Delete |  | body",
    200050: "Sub | consumerGroup topic",
    # Apache's brokers check none of the lite requests but the pop (lite.md §14).
    200070: "Sub | consumerGroup topic",
    200071: "Sub |  | body",
    200074: "Get",
    200075: "Get | topic group",
    200076: "Get | parentTopic",
    200077: "Get | parentTopic group",
    200078: "Get | group",
    200079: "Update | group",
    200051: "Sub | consumerGroup topic",
    200052: "Sub | topic consumerGroup",
    200053: "Sub | consumerGroup topic",
    200054: "Sub | consumerGroup topic",
    200055: "Get | consumerGroup topic",
    200151: "Sub |  | body",
}


def text(right):
    place = "send" if right.is_send else "body" if right.is_body else f"{right.message}: {right.message_actions}"
    return f"{right.actions} | {right.fields} | {place}".rstrip(" |:")


def test_the_rights_of_apache_s_requests_are_those_of_the_table():
    found = {code: text(row.right) for code, row in CATALOG.items() if row.right is not None and code in OF_APACHE}
    assert found == RIGHTS
