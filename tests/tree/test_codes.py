"""The catalog of requests compared with the index of remoting.md §4.1, the handlers with the catalog, and every header
type in both header formats. Requests that Apache does not have need no row here."""

from __future__ import annotations

import ast

import msgspec
import pytest
from hypothesis import HealthCheck, given

from rmqkit.protocol import fastjson
from rmqkit.protocol.catalog import CATALOG
from rmqkit.protocol.codes import RequestCode, ResponseCode, request_name
from rmqkit.protocol.command import (
    JSON,
    ROCKETMQ,
    Command,
    FrameSplitter,
    decode_command,
    decode_header,
    encode_command,
    header_fields,
)
from rmqkit.protocol.operation import Content, Server
from tests.examples import examples
from tests.sources import modules, place
from tests.struct_values import structs, values

# fmt: off
INDEX = {
    "SEND_MESSAGE": (10, 1), "PULL_MESSAGE": (11, 1), "QUERY_MESSAGE": (12, 1), "QUERY_CONSUMER_OFFSET": (14, 1),
    "UPDATE_CONSUMER_OFFSET": (15, 1), "UPDATE_AND_CREATE_TOPIC": (17, 1), "UPDATE_AND_CREATE_TOPIC_LIST": (18, 2),
    "GET_ALL_TOPIC_CONFIG": (21, 2), "UPDATE_BROKER_CONFIG": (25, 2), "GET_BROKER_CONFIG": (26, 2),
    "GET_BROKER_RUNTIME_INFO": (28, 2), "SEARCH_OFFSET_BY_TIMESTAMP": (29, 1), "GET_MAX_OFFSET": (30, 1),
    "GET_MIN_OFFSET": (31, 1), "GET_EARLIEST_MSG_STORETIME": (32, 1), "VIEW_MESSAGE_BY_ID": (33, 1),
    "HEART_BEAT": (34, 1), "UNREGISTER_CLIENT": (35, 1), "CONSUMER_SEND_MSG_BACK": (36, 1), "END_TRANSACTION": (37, 1),
    "GET_CONSUMER_LIST_BY_GROUP": (38, 1), "CHECK_TRANSACTION_STATE": (39, 1), "NOTIFY_CONSUMER_IDS_CHANGED": (40, 1),
    "LOCK_BATCH_MQ": (41, 1), "UNLOCK_BATCH_MQ": (42, 1), "GET_ALL_CONSUMER_OFFSET": (43, 2),
    "GET_ALL_DELAY_OFFSET": (45, 2), "CHECK_CLIENT_CONFIG": (46, 1), "UPDATE_AND_CREATE_ACL_CONFIG": (50, 2),
    "DELETE_ACL_CONFIG": (51, 2), "GET_BROKER_CLUSTER_ACL_INFO": (52, 2), "UPDATE_GLOBAL_WHITE_ADDRS_CONFIG": (53, 2),
    "GET_BROKER_CLUSTER_ACL_CONFIG": (54, 2), "GET_TIMER_CHECK_POINT": (60, 2), "GET_TIMER_METRICS": (61, 2),
    "PUT_KV_CONFIG": (100, 2), "GET_KV_CONFIG": (101, 2), "DELETE_KV_CONFIG": (102, 2), "REGISTER_BROKER": (103, 1),
    "UNREGISTER_BROKER": (104, 1), "GET_ROUTEINFO_BY_TOPIC": (105, 1), "GET_BROKER_CLUSTER_INFO": (106, 1),
    "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP": (200, 2), "GET_ALL_SUBSCRIPTIONGROUP_CONFIG": (201, 2),
    "GET_TOPIC_STATS_INFO": (202, 2), "GET_CONSUMER_CONNECTION_LIST": (203, 2),
    "GET_PRODUCER_CONNECTION_LIST": (204, 2), "WIPE_WRITE_PERM_OF_BROKER": (205, 2),
    "GET_ALL_TOPIC_LIST_FROM_NAMESERVER": (206, 2), "DELETE_SUBSCRIPTIONGROUP": (207, 2),
    "GET_CONSUME_STATS": (208, 2), "DELETE_TOPIC_IN_BROKER": (215, 2), "DELETE_TOPIC_IN_NAMESRV": (216, 2),
    "REGISTER_TOPIC_IN_NAMESRV": (217, 2), "GET_KVLIST_BY_NAMESPACE": (219, 2),
    "RESET_CONSUMER_CLIENT_OFFSET": (220, 2), "GET_CONSUMER_STATUS_FROM_CLIENT": (221, 2),
    "INVOKE_BROKER_TO_RESET_OFFSET": (222, 2), "INVOKE_BROKER_TO_GET_CONSUMER_STATUS": (223, 2),
    "GET_TOPICS_BY_CLUSTER": (224, 2), "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST": (225, 2),
    "QUERY_TOPIC_CONSUME_BY_WHO": (300, 2), "QUERY_CONSUME_TIME_SPAN": (303, 2),
    "GET_SYSTEM_TOPIC_LIST_FROM_NS": (304, 2), "GET_SYSTEM_TOPIC_LIST_FROM_BROKER": (305, 2),
    "CLEAN_EXPIRED_CONSUMEQUEUE": (306, 2), "GET_CONSUMER_RUNNING_INFO": (307, 2),
    "QUERY_CORRECTION_OFFSET": (308, 2), "CONSUME_MESSAGE_DIRECTLY": (309, 2), "SEND_MESSAGE_V2": (310, 1),
    "GET_UNIT_TOPIC_LIST": (311, 2), "GET_HAS_UNIT_SUB_TOPIC_LIST": (312, 2),
    "GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST": (313, 2), "CLONE_GROUP_OFFSET": (314, 2), "VIEW_BROKER_STATS_DATA": (315, 2),
    "CLEAN_UNUSED_TOPIC": (316, 2), "GET_BROKER_CONSUME_STATS": (317, 2), "UPDATE_NAMESRV_CONFIG": (318, 2),
    "GET_NAMESRV_CONFIG": (319, 2), "SEND_BATCH_MESSAGE": (320, 1), "QUERY_CONSUME_QUEUE": (321, 2),
    "QUERY_DATA_VERSION": (322, 1), "RESUME_CHECK_HALF_MESSAGE": (323, 2), "SEND_REPLY_MESSAGE": (324, 1),
    "SEND_REPLY_MESSAGE_V2": (325, 1), "PUSH_REPLY_MESSAGE_TO_CLIENT": (326, 1), "ADD_WRITE_PERM_OF_BROKER": (327, 2),
    "GET_ALL_PRODUCER_INFO": (328, 2), "DELETE_EXPIRED_COMMITLOG": (329, 2), "QUERY_TOPICS_BY_CONSUMER": (343, 2),
    "QUERY_SUBSCRIPTION_BY_CONSUMER": (345, 2), "GET_TOPIC_CONFIG": (351, 2), "GET_SUBSCRIPTIONGROUP_CONFIG": (352, 2),
    "UPDATE_AND_GET_GROUP_FORBIDDEN": (353, 2), "CHECK_ROCKSDB_CQ_WRITE_PROGRESS": (354, 3),
    "EXPORT_ROCKSDB_CONFIG_TO_JSON": (355, 3), "LITE_PULL_MESSAGE": (361, 1), "RECALL_MESSAGE": (370, 2),
    "QUERY_ASSIGNMENT": (400, 3), "SET_MESSAGE_REQUEST_MODE": (401, 3), "GET_ALL_MESSAGE_REQUEST_MODE": (402, 3),
    "UPDATE_AND_CREATE_STATIC_TOPIC": (513, 3), "GET_BROKER_MEMBER_GROUP": (901, 2), "ADD_BROKER": (902, 3),
    "REMOVE_BROKER": (903, 3), "BROKER_HEARTBEAT": (904, 2), "NOTIFY_MIN_BROKER_ID_CHANGE": (905, 2),
    "EXCHANGE_BROKER_HA_INFO": (906, 2), "GET_BROKER_HA_STATUS": (907, 2), "RESET_MASTER_FLUSH_OFFSET": (908, 2),
    "CONTROLLER_ALTER_SYNC_STATE_SET": (1001, 3), "CONTROLLER_ELECT_MASTER": (1002, 3),
    "CONTROLLER_REGISTER_BROKER": (1003, 3), "CONTROLLER_GET_REPLICA_INFO": (1004, 3),
    "CONTROLLER_GET_METADATA_INFO": (1005, 3), "CONTROLLER_GET_SYNC_STATE_DATA": (1006, 3),
    "GET_BROKER_EPOCH_CACHE": (1007, 3), "NOTIFY_BROKER_ROLE_CHANGED": (1008, 3),
    "UPDATE_CONTROLLER_CONFIG": (1009, 3), "GET_CONTROLLER_CONFIG": (1010, 3), "CLEAN_BROKER_DATA": (1011, 3),
    "CONTROLLER_GET_NEXT_BROKER_ID": (1012, 3), "CONTROLLER_APPLY_BROKER_ID": (1013, 3),
    "UPDATE_COLD_DATA_FLOW_CTR_CONFIG": (2001, 3), "REMOVE_COLD_DATA_FLOW_CTR_CONFIG": (2002, 3),
    "GET_COLD_DATA_FLOW_CTR_INFO": (2003, 3), "SET_COMMITLOG_READ_MODE": (2004, 3),
    "AUTH_CREATE_USER": (3001, 2), "AUTH_UPDATE_USER": (3002, 2), "AUTH_DELETE_USER": (3003, 2),
    "AUTH_GET_USER": (3004, 2), "AUTH_LIST_USER": (3005, 2), "AUTH_CREATE_ACL": (3006, 2), "AUTH_UPDATE_ACL": (3007, 2),
    "AUTH_DELETE_ACL": (3008, 2), "AUTH_GET_ACL": (3009, 2), "AUTH_LIST_ACL": (3010, 2),
    "SWITCH_TIMER_ENGINE": (5001, 3), "DELETE_TOPIC_IN_BROKER_LIST": (5002, 2),
    "DELETE_SUBSCRIPTION_GROUP_LIST": (5003, 2), "POP_MESSAGE": (200050, 3), "ACK_MESSAGE": (200051, 3),
    "PEEK_MESSAGE": (200052, 3), "CHANGE_MESSAGE_INVISIBLETIME": (200053, 3), "NOTIFICATION": (200054, 3),
    "POLLING_INFO": (200055, 3), "POP_ROLLBACK": (200056, 3), "POP_LITE_MESSAGE": (200070, 3),
    "LITE_SUBSCRIPTION_CTL": (200071, 3), "ACK_LITE_MESSAGE": (200072, 3), "NOTIFY_UNSUBSCRIBE_LITE": (200073, 3),
    "GET_BROKER_LITE_INFO": (200074, 3), "GET_PARENT_TOPIC_INFO": (200075, 3), "GET_LITE_TOPIC_INFO": (200076, 3),
    "GET_LITE_CLIENT_INFO": (200077, 3), "GET_LITE_GROUP_INFO": (200078, 3), "TRIGGER_LITE_DISPATCH": (200079, 3),
    "BATCH_ACK_MESSAGE": (200151, 3),
}
OF_APACHE = {code for code, _ in INDEX.values()}
NOT_SENT = {13, 22, 23, 27, 47, *range(209, 215), 301, 302}
NAME_SERVER = {
    *range(100, 107), 205, 206, 216, 217, 219, 224, 304, 311, 312, 313, 318, 319, 322, 327, 901, 904,
}
CLIENT = {39, 40, 220, 221, 307, 309, 326, 200073}
RECORDS_OR_BYTES = {
    10: (Content.MESSAGE, None), 11: (None, Content.RECORDS), 12: (None, Content.RECORDS), 25: (Content.SETTINGS, None),
    26: (None, Content.SETTINGS), 33: (None, Content.RECORDS), 39: (Content.RECORDS, None),
    60: (None, Content.TIMER_CHECKPOINT), 310: (Content.MESSAGE, None), 318: (Content.SETTINGS, None),
    319: (None, Content.SETTINGS), 320: (Content.BATCH, None), 324: (Content.MESSAGE, None),
    325: (Content.MESSAGE, None), 326: (Content.MESSAGE, None), 361: (None, Content.RECORDS),
    200050: (None, Content.RECORDS), 200070: (None, Content.RECORDS), 200052: (None, Content.RECORDS),
}
# fmt: on
APACHES = {code: row for code, row in CATALOG.items() if code in OF_APACHE}


def test_every_code_of_the_index_is_in_the_catalog_with_its_name_and_tier():
    assert set(CATALOG) >= OF_APACHE
    assert {CATALOG[code].name: (code, CATALOG[code].tier) for code in OF_APACHE} == INDEX
    assert not set(INDEX) & {row.name for code, row in CATALOG.items() if code not in OF_APACHE}
    assert not NOT_SENT & set(CATALOG)


def test_who_serves_a_request_is_what_the_index_says():
    assert {code for code, row in APACHES.items() if Server.NAME_SERVER in row.servers} == NAME_SERVER
    assert {code for code, row in APACHES.items() if Server.CLIENT in row.servers} == CLIENT
    assert {code for code, row in APACHES.items() if row.servers == (Server.CONTAINER,)} == {902, 903}
    assert {code for code, row in APACHES.items() if Server.CONTROLLER in row.servers} == {904, *range(1001, 1014)} - {
        *(1007, 1008)
    }


def test_bodies_that_are_not_json_are_those_of_the_index():
    found = {
        code: tuple(body if isinstance(body, Content) else None for body in (row.request_body, row.response_body))
        for code, row in APACHES.items()
    }
    assert found[309] == (Content.RECORDS, None)
    assert {code: kinds for code, kinds in found.items() if any(kinds) and code != 309} == RECORDS_OR_BYTES


@pytest.fixture(scope="module")
def handlers():
    """Return for each handler of a server its room, its name, its codes and the header types that it decodes."""
    return list(_handlers())


def _handlers():
    for path in (one for one in modules() if place(one).parts[0] in ("broker", "namesrv")):
        for method in ast.walk(ast.parse(path.read_text())):
            if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            marks = [mark for mark in method.decorator_list if ast.unparse(mark).startswith("answers(")]
            codes = [RequestCode[mark.args[0].attr] for mark in marks if isinstance(mark.args[0], ast.Attribute)]
            decoded = {
                call.args[1].id
                for call in ast.walk(method)
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("decode_header", "decode_short_header")
                if isinstance(call.args[1], ast.Name)
            }
            if codes:
                yield path.stem, method.name, codes, decoded


def test_handlers_decode_the_headers_that_the_catalog_declares(handlers):
    assert len(handlers) > 90
    assert sum(len(decoded) for *_, decoded in handlers) > 25
    for room, method, codes, decoded in handlers:
        declared = {CATALOG[code].request_header for code in codes}
        names = {header.__name__ for header in declared if header is not None}
        assert decoded <= names, f"{room}.{method} decodes {decoded}, and its operations declare {names}"


def test_handlers_answer_only_requests_that_the_catalog_gives_to_a_server(handlers):
    for room, method, codes, _ in handlers:
        for code in codes:
            servers = set(CATALOG[code].servers)
            assert servers & {Server.BROKER, Server.NAME_SERVER}, f"{room}.{method} answers {code.name} of {servers}"


def test_every_declared_request_of_a_server_has_a_handler(handlers):
    answered = {code for _, _, codes, _ in handlers for code in codes}
    declared = {
        code for code, row in CATALOG.items() if row.is_typed and {Server.BROKER, Server.NAME_SERVER} & set(row.servers)
    }
    assert declared - answered == set()


def test_response_codes_have_the_numbers_of_the_table():
    assert [int(code) for code in ResponseCode] == [
        *(0, 1, 2, 3, 4, *range(10, 30), *range(200, 214), 215, 501, 604, 1500, 2017, 2018, 3001, 3002),
    ]


def through_the_wire(code: int, header: msgspec.Struct, serialize_type: int) -> msgspec.Struct:
    pieces = encode_command(Command(code, fields=header_fields(header)), serialize_type)
    (frame,) = FrameSplitter().feed(b"".join(pieces))
    return decode_header(decode_command(frame), type(header))


HEADERS: dict[type[msgspec.Struct], int] = {}
"""Header → its lowest code: only codes below 32,768 have a binary form."""
for _code, _row in sorted(CATALOG.items(), reverse=True):
    HEADERS |= {header: _code for header in (_row.request_header, _row.response_header) if header is not None}


@pytest.mark.parametrize(("header_type", "code"), HEADERS.items(), ids=lambda part: getattr(part, "__name__", part))
def test_every_header_survives_json_and_binary(header_type: type[msgspec.Struct], code: int):
    @examples(25, suppress=[HealthCheck.filter_too_much])
    @given(structs(header_type))
    def survives(header):
        assert through_the_wire(code, header, JSON) == header
        if code <= 32767:
            assert through_the_wire(code, header, ROCKETMQ) == header

    survives()


BODIES = {
    str(body): body
    for operation in CATALOG.values()
    for body in (operation.request_body, operation.response_body)
    if body is not None and not isinstance(body, Content)
}


@pytest.mark.parametrize("body", BODIES.values(), ids=lambda body: getattr(body, "__name__", str(body)))
def test_every_json_body_survives_the_dialect(body):
    @examples(25, suppress=[HealthCheck.filter_too_much])
    @given(values(body))
    def survives(value):
        assert fastjson.decode_as(fastjson.dumps(value), body) == value

    survives()


def test_people_read_a_request_s_name_and_number():
    assert [request_name(310), request_name(RequestCode.PULL_MESSAGE), request_name(9999)] == [
        "SEND_MESSAGE_V2 (310)",
        "PULL_MESSAGE (11)",
        "request 9999",
    ]
