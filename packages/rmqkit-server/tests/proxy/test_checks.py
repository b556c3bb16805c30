"""Checks before a call reaches a broker: codes and texts. Source: grpc.md §4, §5.4."""

import pytest

from rmqkit.proxy.schema.checks import check_group, check_messages, check_sent, check_topic, sql_or_tags
from rmqkit.proxy.schema.messages import message_class
from rmqkit.proxy.schema.status import Code, Refused
from tests.proxy.calling import message

NOW_MS = 1_700_000_000_000
LEGAL = "allowing only ^[%|a-zA-Z0-9_-]+$"
SEND = message_class("SendMessageRequest")


def refused(check, *arguments):
    with pytest.raises(Refused) as caught:
        check(*arguments)
    return caught.value.code.name, caught.value.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "The specified topic is blank"),
        (" ", "The specified topic is blank"),
        ("t" * 128, "The specified topic is longer than topic max length 127."),
        ("a b", f"The specified topic[a b] contains illegal characters, {LEGAL}"),
        ("tö", f"The specified topic[tö] contains illegal characters, {LEGAL}"),
        ("SCHEDULE_TOPIC_XXXX", "cannot access system topic"),
        ("rmq_sys_wheel_timer", "cannot access system topic"),
    ],
)
def test_topics_that_are_refused(name, text):
    assert refused(check_topic, name) == ("ILLEGAL_TOPIC", text)


@pytest.mark.parametrize("name", ["T", "%RETRY%G", "%DLQ%G", "a|b-c_d", "t" * 127])
def test_topics_that_pass(name):
    assert check_topic(name) == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "the specified group is blank"),
        ("g" * 121, f"the specified group[{'g' * 121}] is longer than group max length: 120."),
        ("a b", f"the specified group[a b] contains illegal characters, {LEGAL}"),
        ("CID_RMQ_SYS_X", "cannot use system consumer group"),
    ],
)
def test_groups_that_are_refused(name, text):
    code, said = refused(check_group, name)
    assert code == "ILLEGAL_CONSUMER_GROUP"
    assert said.rstrip(".") == text.rstrip(".")


LITE_RULE = "lite topic can only contain alphanumeric characters, hyphens(-), and underscores(_)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (" ", "lite topic cannot be the char sequence of whitespace"),
        ("x" * 65, "lite topic exceed the max size 64"),
        *((name, LITE_RULE) for name in ("a$b", "a b", "é", "a/b", "a,b", "a%b", "a.b:c")),
    ],
)
def test_a_message_with_an_illegal_lite_topic_is_refused(name, text):
    asked = SEND(messages=[message(lite_topic=name)])
    assert refused(check_messages, asked.messages, NOW_MS) == ("ILLEGAL_LITE_TOPIC", text)


@pytest.mark.parametrize("name", ["x" * 64, "s1", "0", "-_", ""])
def test_a_message_with_a_legal_lite_topic_passes(name):
    assert check_messages(SEND(messages=[message(lite_topic=name)]).messages, NOW_MS) == "T"


def test_a_group_of_tools_passes():
    assert check_group("TOOLS_CONSUMER") == "TOOLS_CONSUMER"


MESSAGES = {
    "none": ([], "MESSAGE_CORRUPTED", "no message to send"),
    "two topics": ([message(), message("U")], "MESSAGE_CORRUPTED", "topic in message is not same"),
    "no body": ([message(body=b"")], "MESSAGE_BODY_EMPTY", "message body cannot be empty"),
    "long body": (
        [message(body=bytes((4 << 20) + 1))],
        "MESSAGE_BODY_TOO_LARGE",
        "message body cannot exceed the max 4194304",
    ),
    "129 properties": (
        [message(properties={f"p{number}": "v" for number in range(129)})],
        "MESSAGE_PROPERTIES_TOO_LARGE",
        "too many user properties, max is 128",
    ),
    "reserved name": (
        [message(properties={"TIMER_DELAY_MS": "1"})],
        "ILLEGAL_MESSAGE_PROPERTY_KEY",
        "property is used by system: TIMER_DELAY_MS",
    ),
    "multi dispatch": (
        [message(properties={"INNER_MULTI_DISPATCH": "%LMQ%a"})],
        "ILLEGAL_MESSAGE_PROPERTY_KEY",
        "property is used by system: INNER_MULTI_DISPATCH",
    ),
    "control in name": (
        [message(properties={"a\x01b": "v"})],
        "ILLEGAL_MESSAGE_PROPERTY_KEY",
        "the key of property cannot contain control character",
    ),
    "control in value": (
        [message(properties={"a": "v\x9f"})],
        "ILLEGAL_MESSAGE_PROPERTY_KEY",
        "the value of property cannot contain control character",
    ),
    "blank tag": ([message(tag=" ")], "ILLEGAL_MESSAGE_TAG", "tag cannot be the char sequence of whitespace"),
    "tag with a bar": ([message(tag="a|b")], "ILLEGAL_MESSAGE_TAG", "tag cannot contain '|'"),
    "tag with a control": ([message(tag="a\x02")], "ILLEGAL_MESSAGE_TAG", "tag cannot contain control character"),
    "blank key": ([message(keys=[" "])], "ILLEGAL_MESSAGE_KEY", "key cannot be the char sequence of whitespace"),
    "key with a control": ([message(keys=["\x00"])], "ILLEGAL_MESSAGE_KEY", "key cannot contain control character"),
    "16 KiB and one": (
        [message(properties={"n": "ö" * 8192})],
        "MESSAGE_PROPERTIES_TOO_LARGE",
        "the total size of user property is too large, max is 16384",
    ),
    "no id": ([message(message_id=" ")], "ILLEGAL_MESSAGE_ID", "message id cannot be empty"),
    "a property in an id": (
        [message(message_id="ID1\x02WAIT\x01false")],
        "ILLEGAL_MESSAGE_ID",
        "message id cannot contain control character",
    ),
    "a property in a host": (
        [message(born_host="h\x02TIMER_DELIVER_MS\x011")],
        "BAD_REQUEST",
        "born host cannot contain control character",
    ),
    "long recovery": (
        [message(message_type=4, orphaned_transaction_recovery_duration={"seconds": 3601})],
        "BAD_REQUEST",
        "the max transaction recovery time of message is too large, max is 3600",
    ),
    "negative recovery": (
        [message(message_type=4, orphaned_transaction_recovery_duration={"seconds": -1})],
        "BAD_REQUEST",
        "the transaction recovery time of message is -1000 ms",
    ),
    "long delay": (
        [message(delivery_timestamp={"seconds": NOW_MS // 1000 + 86_401})],
        "ILLEGAL_DELIVERY_TIME",
        "the max delay time of message is too large, max is 86400000",
    ),
    "a time beyond all": (
        [message(delivery_timestamp={"seconds": 1 << 62})],
        "ILLEGAL_DELIVERY_TIME",
        f"a time of {1 << 62} s and 0 ns is out of range",
    ),
    "nanos that are none": (
        [message(delivery_timestamp={"nanos": -2_000_000_000})],
        "ILLEGAL_DELIVERY_TIME",
        "a time of 0 s and -2000000000 ns is out of range",
    ),
    "priority": (
        [message(priority=-1)],
        "BAD_REQUEST",
        "the priority of message is -1: it must not be negative",
    ),
    "a property in a group": (
        [message(message_group="g\x02WAIT\x01false")],
        "ILLEGAL_MESSAGE_GROUP",
        "message group cannot contain control character",
    ),
    "a property in a trace": (
        [message(trace_context="t\x02WAIT\x01false")],
        "BAD_REQUEST",
        "trace context cannot contain control character",
    ),
    "blank group": (
        [message(message_group=" ")],
        "ILLEGAL_MESSAGE_GROUP",
        "message group cannot be the char sequence of whitespace",
    ),
    "long group": (
        [message(message_group="g" * 64)],
        "ILLEGAL_MESSAGE_GROUP",
        "message group exceed the max size 64",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_that_are_refused(name):
    messages, code, text = MESSAGES[name]
    assert refused(check_messages, SEND(messages=messages).messages, NOW_MS) == (code, text)


FAULTS = [
    ("MESSAGE_BODY_EMPTY", {"body": b""}, {"body": b"b"}),
    ("ILLEGAL_MESSAGE_PROPERTY_KEY", {"properties": {"TAGS": "v"}}, {"properties": {}}),
    ("ILLEGAL_MESSAGE_TAG", {"tag": " "}, {"tag": "t"}),
    ("ILLEGAL_MESSAGE_KEY", {"keys": [" "]}, {"keys": ["k"]}),
    ("ILLEGAL_MESSAGE_ID", {"message_id": " "}, {"message_id": "ID1"}),
    ("ILLEGAL_DELIVERY_TIME", {"delivery_timestamp": {"seconds": NOW_MS // 1000 + 86_401}}, {"delivery_timestamp": {}}),
    ("BAD_REQUEST", {"priority": -1}, {"priority": 1}),
    ("ILLEGAL_MESSAGE_GROUP", {"message_group": " "}, {"message_group": "g"}),
]


def test_of_several_faults_the_first_in_the_references_order_is_reported():
    fields = {key: value for _, wrong, _ in FAULTS for key, value in wrong.items()}
    for code, _, right in FAULTS:
        assert refused(check_messages, SEND(messages=[message(**fields)]).messages, NOW_MS)[0] == code
        fields |= right


def test_what_is_at_its_bounds_passes():
    own = message(
        body=bytes(4 << 20),
        properties={"n": "v" * 16383},
        message_group="g" * 63,
        delivery_timestamp={"seconds": NOW_MS // 1000 + 86_400},
    )
    assert check_messages(SEND(messages=[own]).messages, NOW_MS) == "T"


@pytest.mark.parametrize("topic_type", ["NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "UNSPECIFIED"])
@pytest.mark.parametrize("message_type", ["NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY"])
def test_a_topic_takes_its_own_type(topic_type, message_type):
    if topic_type == message_type:
        check_sent(topic_type, message_type, "T")
        return
    text = f"TopicMessageType validate failed, the expected type is {topic_type}, but actual type is {message_type}"
    assert refused(check_sent, topic_type, message_type, "T") == ("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", text)
    check_sent("MIXED", message_type, "T")
    check_sent(topic_type, message_type, "%RETRY%G")


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        (1, "", ("TAG", "*")),
        (0, "a", ("TAG", "a")),
        (1, "a || b", ("TAG", "a || b")),
        (2, "a > 1", ("SQL92", "a > 1")),
        (1, " || ", None),
        (2, " ", None),
        (99, "a", ("TAG", "a")),
    ],
)
def test_filter_expressions(kind, text, wanted):
    expression = message_class("FilterExpression")(type=kind, expression=text)
    if wanted is None:
        assert refused(sql_or_tags, expression)[0] == Code.ILLEGAL_FILTER_EXPRESSION.name
    else:
        assert sql_or_tags(expression) == wanted
