"""``rmq admin NOUN VERB``: operations on a cluster; a noun's module is imported when one of its verbs is used.

Java's command names (`JAVA`) are accepted in place of noun and verb, with Java's short options.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from rmqkit.cli import with_bare_flags

__all__ = ["app"]


NOUNS = {
    "cluster": "servers",
    "topic": "topic",
    "broker": "servers",
    "namesrv": "servers",
    "group": "groups",
    "offset": "groups",
    "consumer": "clients",
    "producer": "clients",
    "message": "message",
    "dead": "dead",
    "waiting": "waiting",
    "filter": "filters",
    "user": "access",
    "policy": "access",
}
"""Noun → the module that has it."""


class _LateNouns(TyperGroup):
    """Nouns are listed; Java's names are found as well, and both are suggested for a mistyped one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(NOUNS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        noun, _, verb = (cmd_name if cmd_name in NOUNS else JAVA.get(cmd_name, cmd_name)).partition(" ")
        if noun not in NOUNS:
            return None
        module = import_module(f"rmqkit.cli.admin.{NOUNS[noun]}")
        group: Any = typer.main.get_group(getattr(module, noun.upper()).app)
        return with_bare_flags(group.commands[verb] if verb else group)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = dict.fromkeys((*NOUNS, *JAVA))  # type: ignore[assignment] # names that may be suggested
        ctx.default_map = JAVA_DEFAULTS
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_LateNouns,
    name="admin",
    help="Inspect and change a cluster: brokers, topics, groups, offsets, messages.",
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
    "listAcl": "policy list",
    "getAcl": "policy list",
}
"""Command of mqadmin → ours; a noun of the same name goes first (``producer``)."""

JAVA_DEFAULTS: dict[str, dict[str, bool]] = {
    "topicList": {"system": True},
    "deleteTopic": {"yes": True},
    "deleteSubGroup": {"yes": True},
}
"""What scripts count on that use a command by its name in mqadmin: nothing is left out, and nothing asked."""
