"""``rmq admin``: the commands of Apache's mqadmin, under its names and with its short options.

Existing scripts continue to work: ``rmq admin topicStatus -t Orders`` runs ``rmq topic status Orders``. `JAVA` maps
mqadmin's names to noun and verb.
"""

from __future__ import annotations

import copy
from typing import Any

import typer
from typer.core import TyperGroup

from rmqkit.cli import noun_group

__all__ = ["JAVA", "app"]


class _JavaNames(TyperGroup):
    """A group that has each verb under mqadmin's name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(JAVA)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in JAVA:
            return None
        noun, verb = JAVA[cmd_name].split()
        command = copy.copy(noun_group(noun).get_command(ctx, verb))
        command.name = cmd_name  # the name in the help
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = dict.fromkeys(JAVA)  # type: ignore[assignment] # names that may be suggested
        ctx.default_map = JAVA_DEFAULTS
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_JavaNames,
    name="admin",
    help="Run a command of Apache's mqadmin by its own name: rmq admin topicStatus -t Orders.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _admin() -> None: ...


JAVA = {
    "clusterList": "cluster list",
    "clusterRT": "cluster rt",
    "topicList": "topic list",
    "topicRoute": "topic route",
    "topicStatus": "topic status",
    "topicClusterList": "topic clusters",
    "updateTopic": "topic create",
    "deleteTopic": "topic delete",
    "updateTopicPerm": "topic perm",
    "updateOrderConf": "topic order",
    "allocateMQ": "topic allocate",
    "statsAll": "topic stats",
    "checkMsgSendRT": "topic rt",
    "brokerStatus": "broker status",
    "getBrokerConfig": "broker config-get",
    "updateBrokerConfig": "broker config-set",
    "brokerConsumeStats": "broker consume-stats",
    "sendMsgStatus": "broker send-test",
    "haStatus": "broker ha-status",
    "getBrokerHAStatus": "broker ha-status",
    "cleanExpiredCQ": "broker clean-expired-cq",
    "cleanUnusedTopic": "broker clean-unused-topic",
    "deleteExpiredCommitLog": "broker delete-expired-commitlog",
    "getNamesrvConfig": "namesrv config-get",
    "updateNamesrvConfig": "namesrv config-set",
    "wipeWritePerm": "namesrv wipe-write",
    "addWritePerm": "namesrv add-write",
    "updateKvConfig": "namesrv kv-put",
    "deleteKvConfig": "namesrv kv-delete",
    "updateSubGroup": "group create",
    "deleteSubGroup": "group delete",
    "getConsumerConfig": "group show",
    "consumerProgress": "group progress",
    "setConsumeMode": "group mode",
    "exportMetadata": "group export",
    "resetOffsetByTime": "offset reset",
    "skipAccumulatedMessage": "offset skip",
    "cloneGroupOffset": "offset clone",
    "consumerStatus": "consumer status",
    "consumerConnection": "consumer connections",
    "producer": "producer list",
    "producerConnection": "producer connections",
    "queryMsgById": "message show",
    "queryMsgByUniqueKey": "message show",
    "queryMsgByKey": "message by-key",
    "queryMsgByOffset": "message at",
    "printMsg": "message list",
    "printMsgByQueue": "message list",
    "consumeMessage": "message consume",
    "sendMessage": "message send",
    "queryMsgTraceById": "message trace",
    "queryCq": "message entries",
    "createUser": "user create",
    "updateUser": "user update",
    "deleteUser": "user delete",
    "listUser": "user list",
    "createAcl": "policy put",
    "updateAcl": "policy put",
    "deleteAcl": "policy delete",
    "getBrokerLiteInfo": "lite brokers",
    "getParentTopicInfo": "lite parent",
    "getLiteTopicInfo": "lite show",
    "getLiteGroupInfo": "lite group",
    "getLiteClientInfo": "lite client",
    "triggerLiteDispatch": "lite dispatch",
    "listAcl": "policy list",
    "getAcl": "policy list",
}
"""mqadmin's command → noun and verb."""

JAVA_DEFAULTS: dict[str, dict[str, bool]] = {
    "topicList": {"system": True},
    "deleteTopic": {"yes": True},
    "deleteSubGroup": {"yes": True},
}
"""Defaults as in mqadmin: lists contain system topics, and deletions need no confirmation."""
