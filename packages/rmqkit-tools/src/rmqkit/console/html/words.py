"""The words that reach a page as values. The filter ``text`` of templates translates them.

A state, for example, is stored, sent and compared in English, and translated only when a page shows it.
"""

from __future__ import annotations

from rmqkit.sentences import marked

# fmt: off
WORDS = (
    # the kinds of names in errors about unknown names
    marked("topic"), marked("group"), marked("broker"), marked("cluster"), marked("message"), marked("client"),
    marked("user"), marked("key"), marked("entry"), marked("producer group"), marked("master of"),
    marked("offset of group"), marked("message with key"), marked("POP of broker"), marked("rule"),
    marked("channel"),
    # severities, states and outcomes
    marked("bad"), marked("warning"), marked("note"), marked("firing"), marked("pending"), marked("resolved"),
    marked("delivered"), marked("undelivered"), marked("dropped"), marked("lost"), marked("test"), marked("silent"),
    marked("running"), marked("paused"), marked("done"), marked("failed"), marked("refused"), marked("intent"),
    marked("ended"), marked("new"), marked("asked"), marked("given up"), marked("success"), marked("under way"),
    marked("unknown"), marked("caught up"), marked("moving"), marked("unreachable"), marked("full"), marked("busy"),
    marked("failing"), marked("waiting for turn"), marked("waiting for lock"), marked("taking over"),
    marked("Allow"), marked("Deny"),
    # kinds of topics
    marked("normal"), marked("retry"), marked("retries"), marked("system"), marked("all"), marked("unused"),
    marked("delay"), marked("fifo"), marked("transaction"),
    # how a group consumes
    marked("clustering"), marked("broadcasting"), marked("passively"), marked("actively"),
    marked("from_last_offset"), marked("from_first_offset"), marked("from_timestamp"), marked("from last offset"),
    marked("from first offset"), marked("from timestamp"),
    # fields of forms
    marked("skip"), marked("value"), marked("samples"), marked("since"), marked("until"), marked("time"),
    marked("offset"), marked("queue"), marked("attribute"), marked("setting"), marked("property"),
    # settings of topics and groups
    marked("read queue nums"), marked("write queue nums"), marked("perm"), marked("order"), marked("attributes"),
    marked("topic name"), marked("topic filter type"), marked("topic sys flag"), marked("consume enable"),
    marked("consume broadcast enable"), marked("consume from min enable"), marked("consume message orderly"),
    marked("consume timeout minute"), marked("notify consumer ids changed enable"), marked("retry max times"),
    marked("retry queue nums"), marked("subscription data set"), marked("which broker when consume slowly"),
    marked("broker id"), marked("group name"), marked("group retry policy"), marked("group sys flag"),
    marked("retry policy"),
    # the reasons why a client waits
    marked("another member of the group has it"), marked("its lock was just granted"),
    marked("the program paused it: call resume() to continue"),
    marked("it is released when its handlers have finished"), marked("its former owner may still save"),
    marked("the program to iterate further"),
)
# fmt: on
