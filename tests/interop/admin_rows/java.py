"""Every command of Apache's mqadmin, to be run against Apache's servers and against ours.

Lines run in their order. A line destroys only objects that it or another line has created, with names that begin with
``mq_``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One line to mqadmin.

    Args:
        command: with its options; ``{name}`` is a member of the world, ``{folder}`` a folder to write to.
        shows: a regular expression that the output of a successful command must match.
        stops_after: number of output lines after which an endless command is interrupted.
        reason: why it cannot work with our servers, if the refusal does not contain the reason.
    """

    command: str
    shows: str
    stops_after: int = 0
    reason: str = ""

    @property
    def name(self) -> str:
        return self.command.split()[0]


LINES = [
    Line("updateTopic -c {cluster} -t mq_topic -r 2 -w 2", "create topic to {broker} success"),
    Line("updateTopicList -b {broker} -f {folder}/topics.json", "submit batch of topic config to {broker} success"),
    Line("deleteTopic -c {cluster} -t mq_topic", r"delete topic \[mq_topic\] from NameServer success"),
    Line("updateSubGroup -b {broker} -g mq_group -r 3", "create subscription group to {broker} success"),
    Line("updateSubGroupList -b {broker} -f {folder}/groups.json", "submit batch of group config to {broker} success"),
    Line("setConsumeMode -b {broker} -t {topic} -g {group} -m POP -q 1", "set consume mode to {broker} success"),
    Line("setConsumeMode -b {broker} -t {topic} -g {group} -m PULL", "set consume mode to {broker} success"),
    Line("deleteSubGroup -b {broker} -g mq_group -r true", r"delete subscription group \[mq_group\] from broker"),
    Line("updateBrokerConfig -b {broker} -k flushIntervalCommitLog -v 444", "update broker config success"),
    Line("updateTopicPerm -b {broker} -t {empty} -p 4", "update topic perm from 6 to 4"),
    Line("updateTopicPerm -b {broker} -t {empty} -p 6", "update topic perm from 4 to 6"),
    Line("topicRoute -t {topic}", '"brokerName":"{broker_name}"'),
    Line("topicStatus -t {topic}", "{broker_name} +3 +0 +3"),
    Line("topicClusterList -t {topic}", "{cluster}"),
    Line("updateTopic -b {broker} -t %RETRY%{group} -r 1 -w 1", "create topic to {broker} success"),
    Line("updateTopic -b {broker} -t %RETRY%{twin} -r 1 -w 1", "create topic to {broker} success"),
    Line("addBroker -c {broker} -b {folder}/other.conf", "add broker to {broker} success"),
    Line("removeBroker -c {broker} -b {cluster}:{broker_name}:0", "remove broker from {broker} success"),
    Line("resetMasterFlushOffset -b {broker} -o 0", "reset master flush offset to 0 success"),
    Line("brokerStatus -b {broker}", "brokerVersionDesc +: V5"),
    Line("queryMsgById -t {topic} -i {message_id}", "Topic: +{topic}"),
    Line("queryMsgByKey -t {topic} -k key-0", "{unique_key}"),
    Line("queryMsgByUniqueKey -t {topic} -i {unique_key}", "Topic: +{topic}"),
    Line("queryMsgByOffset -t {topic} -b {broker_name} -i 0 -o 1", "Topic: +{topic}"),
    Line("queryMsgTraceById -i {traced}", "mq_traced"),
    Line("printMsg -t {topic} -d true", "message 11"),
    Line("printMsgByQueue -t {topic} -a {broker_name} -i 0 -p true -d true", "message 4"),
    Line("sendMsgStatus -b {broker_name} -s 16 -c 2", "SEND_OK"),
    Line("brokerConsumeStats -b {broker}", "Diff Total: "),
    Line("producerConnection -g {producers} -t {topic}", "PYTHON"),
    Line("consumerConnection -g {online}", "{client_id}"),
    Line("consumerProgress -g {group}", "Consume Diff Total: 8"),
    Line("consumerProgress", "{online}"),
    Line("consumerStatus -g {online} -i {client_id}", "#Consumer Subscription#"),
    Line("cloneGroupOffset -s {group} -d {twin} -t {topic}", "clone group offset success"),
    Line("producer -b {broker}", "{producers}"),
    Line("clusterList", "{broker}"),
    Line("topicList", "{topic}"),
    Line("updateKvConfig -s MQ -k a -v b", "create or update kv config to namespace success"),
    Line("deleteKvConfig -s MQ -k a", "delete kv config from namespace success"),
    Line("wipeWritePerm -b {broker_name}", r"wipe write perm of broker\[{broker_name}\] in name server.* OK"),
    Line("addWritePerm -b {broker_name}", r"add write perm of broker\[{broker_name}\] in name server.* OK"),
    Line("resetOffsetByTime -g {group} -t {topic} -s -1", "{broker_name} +0 +[0-3]"),
    Line("skipAccumulatedMessage -g {group} -t {topic}", "{broker_name} +0 +[0-3]"),
    Line("updateOrderConf -t {empty} -m put -v {broker_name}:2", "update orderConf success"),
    Line("updateOrderConf -t {empty} -m get", "{broker_name}:2"),
    Line("updateOrderConf -t {empty} -m delete", "delete orderConf success"),
    Line("cleanExpiredCQ -b {broker}", "success"),
    Line("deleteExpiredCommitLog -b {broker}", "success"),
    Line("cleanUnusedTopic -b {broker}", "success"),
    Line("statsAll -t {topic}", "{topic}"),
    Line("allocateMQ -t {topic} -i 192.0.2.1,192.0.2.2", '"queueId":3'),
    Line("checkMsgSendRT -t {empty} -a 2 -s 16", "Avg RT"),
    Line("clusterRT -a 2 -s 16 -i 1", "{cluster}", stops_after=2),
    Line("getNamesrvConfig", "listenPort"),
    Line("updateNamesrvConfig -k waitSecondsForService -v 45", "update name server config success"),
    Line("getBrokerConfig -b {broker}", "flushIntervalCommitLog"),
    Line("getConsumerConfig -g {group}", "{group}"),
    Line("queryCq -t {topic} -q 0 -i 0 -c 2 -b {broker}", "idx: 1"),
    Line("sendMessage -t {topic} -p sent -b {broker_name} -i 1", "SEND_OK"),
    Line("consumeMessage -t {topic} -b {broker_name} -i 0 -c 1", "message 0"),
    Line("exportMetadata -c {cluster} -f {folder}", "export .*metadata.json success"),
    Line("exportMetadata -b {broker} -f {folder} -t", "export .*topic.json success"),
    Line("exportConfigs -c {cluster} -f {folder}", "export .*configs.json success"),
    Line("exportMetrics -c {cluster} -f {folder}", "export .*metrics.json success"),
    Line("exportMetadataInRocksDB -p {folder} -t topics -j true", "topicConfigTable"),
    Line("exportPopRecord -b {broker} -d true", "{broker_name}"),
    Line("haStatus -b {broker}", "#SlaveNum"),
    Line("getSyncStateSet -a {namesrv} -b {broker_name}", ""),
    Line("getBrokerEpoch -b {broker_name}", ""),
    Line("getControllerMetaData -a {namesrv}", ""),
    Line("getControllerConfig -a {namesrv}", ""),
    Line("updateControllerConfig -a {namesrv} -k a -v b", ""),
    Line("electMaster -a {namesrv} -b 0 -bn {broker_name} -c {cluster}", ""),
    Line("cleanBrokerMetadata -a {namesrv} -bn {broker_name} -c {cluster} -b 1", ""),
    Line("dumpCompactionLog -f {folder}/none", ""),
    Line("getColdDataFlowCtrInfo -b {broker}", "configTable"),
    Line("updateColdDataFlowCtrGroupConfig -b {broker} -g {group} -v 1024", "success"),
    Line("removeColdDataFlowCtrGroupConfig -b {broker} -g {group}", "success"),
    Line("setCommitLogReadAheadMode -b {broker} -m 0", "success"),
    Line("createUser -b {broker} -u mq_user -p secret -t Normal", "create user to {broker} success"),
    Line("updateUser -b {broker} -u mq_user -p other", "update user to {broker} success"),
    Line("getUser -b {broker} -u mq_user", "mq_user"),
    Line("listUser -b {broker} -f mq", "mq_user"),
    Line("copyUser -f {broker} -t {broker} -u mq_user", "copy user of mq_user"),
    Line(
        "createAcl -b {broker} -s User:mq_user -r Topic:{topic} -a Pub,Sub -d Allow", "create acl to {broker} success"
    ),
    Line("updateAcl -b {broker} -s User:mq_user -r Topic:{topic} -a Sub -d Deny", "update acl to {broker} success"),
    Line("getAcl -b {broker} -s User:mq_user", "Topic:{topic}"),
    Line("listAcl -b {broker} -s mq_user", "Topic:{topic}"),
    Line("copyAcl -f {broker} -t {broker} -s User:mq_user", "copy acl of User:mq_user"),
    Line("deleteAcl -b {broker} -s User:mq_user", "delete acl to {broker} success"),
    Line("deleteUser -b {broker} -u mq_user", "delete user to {broker} success"),
    Line("rocksDBConfigToJson -t topics -c {cluster} -b {broker}", "broker export done"),
    Line("checkRocksdbCqWriteProgress -c {cluster} -n {namesrv}", "check doing"),
    Line("switchTimerEngine -b {broker} -e F", "switchTimerEngine to FILE_TIME_WHEEL success"),
    Line("updateTopic -c {cluster} -t mq_lite -r 1 -w 1 -a +message.type=LITE", "create topic to {broker} success"),
    Line(
        "updateSubGroup -b {broker} -g mq_lite_group --attributes +lite.bind.topic=mq_lite",
        "create subscription group to {broker} success",
    ),
    Line("getBrokerLiteInfo -c {cluster}", r"{broker} +default +\d+ +0 +0 +0 "),
    Line("getParentTopicInfo -p mq_lite", r"{broker_name} +-1 +0 +0 +\[mq_lite_group\]"),
    Line("getLiteTopicInfo -p mq_lite -l mq_session", r"{broker_name} +0 +0 +- +true +0"),
    Line("getLiteGroupInfo -p mq_lite -g mq_lite_group", "Total Lag Count: 0"),
    Line("getLiteClientInfo -p mq_lite -g mq_lite_group -c mq_nobody", "{broker_name} +N/A +N/A +N/A"),
    Line("triggerLiteDispatch -p mq_lite -g mq_lite_group", "{broker_name} +dispatched"),
    Line("deleteSubGroup -b {broker} -g mq_lite_group -r true", r"delete subscription group \[mq_lite_group\] from"),
    Line("deleteTopic -c {cluster} -t mq_lite", r"delete topic \[mq_lite\] from NameServer success"),
    Line("updateStaticTopic -c {cluster} -t mq_static -qn 2", "The old mapping data is written to file"),
    Line("remappingStaticTopic -c {cluster} -t mq_static", "The old mapping data is written to file"),
    Line("deleteTopic -c {cluster} -t mq_static", "from NameServer success"),
    Line("startMonitoring", ""),
]
