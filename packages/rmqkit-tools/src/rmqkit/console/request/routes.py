"""The table of all addresses. The reference page is generated from the table, and a test requests each address."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["OUTSIDE", "ROUTES", "Route"]


class Route(Struct, frozen=True):
    """One line of the table.

    Attributes:
        path: the path, with names in braces; pages of a cluster begin with ``{env}``.
        view: ``module:function`` of `rmqkit.console.views`, or a method of the console.
        about: a description of the page, for the reference.
        posts: True if the page accepts posted forms.
        live_s: the seconds between refreshes; 0: no refreshes.
    """

    path: str
    view: str
    about: str
    posts: bool = False
    live_s: float = 0.0


ROUTES: tuple[Route, ...] = (
    Route("/", "outside:home", "The first page of the only cluster, or the list of clusters.", live_s=10),
    Route("/login", "outside:login", "Log in, and out: access key and secret, or name and password.", posts=True),
    Route("/login/oidc", "outside:oidc", "Log in by OpenID Connect: to the provider; back with `code` and `state`."),
    Route("/theme", "outside:theme", "Keeps the choice of light or dark, or of the language, in a cookie.", posts=True),
    Route("/audit", "outside:audit", "Who changed what, and what was refused; `q` filters."),
    Route("/about", "outside:about", "Versions, what the console costs each broker, whether it is well.", live_s=10),
    Route("/events", "events", "Refreshes of a page, as server-sent events; `path` names the page."),
    Route("/static/{file}", "outside:static", "Style sheet and scripts."),
    Route("/{env}/", "overview:overview", "What is wrong, rates, the worst lags, dead letters, disks.", live_s=10),
    Route("/{env}/search", "search:search",
          "A message id, a key, a topic, a group or a client id, `q`; keys in one `topic` alone. One match is opened."),
    Route("/{env}/topics", "topics:topics", "Topics; `q`, `kind`, `sort`, `page`.", live_s=30),
    Route("/{env}/new-topic", "changes:new_topic", "Create a topic.", posts=True),
    Route("/{env}/topics/{t}/edit", "changes:edit_topic", "Queues, permission, attributes of a topic.", posts=True),
    Route("/{env}/topics/{t}/delete", "changes:delete_topic", "Delete a topic; its name has to be typed.", posts=True),
    Route("/{env}/topics/{t}", "topics:topic", "One topic: queues, groups, senders, settings per broker.", live_s=10),
    Route("/{env}/topics/{t}/messages", "messages:search",
          "Messages by time, place, key or id; `tags`, `sql`, `order`, `cursor`; `format=jsonl` or `csv` saves."),
    Route("/{env}/topics/{t}/tail", "messages:tail", "Messages as they come; `tags`, `sql`, `key`, `queue`."),
    Route("/{env}/topics/{t}/tail/events", "messages:tail_events", "The rows of the tail, as server-sent events."),
    Route("/{env}/topics/{t}/lite", "lite:parent",
          "Lite topics of a parent topic by name: `q` is a prefix, `after` the name before the page; `group`.",
          live_s=10),
    Route("/{env}/topics/{t}/lite/{n}", "lite:lite_topic",
          "One lite topic: bounds, expiry, groups, subscribers, and its newest messages as they come.", live_s=2),
    Route("/{env}/topics/{t}/lite/{n}/explain", "lite:why",
          "Why a group gets nothing: `group`, and `number` or `client`."),
    Route("/{env}/topics/{t}/lite/{n}/delete", "lite:delete", "Delete a lite topic; its name has to be typed.",
          posts=True),
    Route("/{env}/topics/{t}/send", "messages:send", "Send a test message: form, review, result.", posts=True),
    Route("/{env}/topics/{t}/m/{id}", "message:by_id",
          "One message by its id: body, properties, timeline, and what became of it in each group.",
          posts=True, live_s=5),
    Route("/{env}/topics/{t}/at/{broker}/{queue}/{offset}", "message:by_place",
          "The same, by its place; `download=1` gives the whole body.", posts=True, live_s=5),
    Route("/{env}/groups", "groups:groups", "Consumer groups, the worst first; `q`, `sort`, `page`.", live_s=10),
    Route("/{env}/new-group", "changes:new_group", "Create a consumer group.", posts=True),
    Route("/{env}/groups/{g}/edit", "changes:edit_group", "Every setting of a group, explained.", posts=True),
    Route("/{env}/groups/{g}/delete", "changes:delete_group", "Delete a group; its name has to be typed.", posts=True),
    Route("/{env}/groups/{g}/offsets", "changes:offsets",
          "Move a group to a time, the end, an offset, or where another is: each queue shown before. `topic`.",
          posts=True),
    Route("/{env}/groups/{g}/dead", "dead:group_dead",
          "Dead letters by kind (`by`, `property`), a dry run of a replay, and its start.", posts=True),
    Route("/{env}/dead", "dead:dead", "Groups with dead letters.", live_s=30),
    Route("/{env}/jobs", "dead:jobs", "Replays of dead letters.", live_s=10),
    Route("/{env}/jobs/{id}", "dead:job",
          "One replay: how far it is, pause, resume; `download=1` gives a line for each message.", posts=True,
          live_s=1),
    Route("/{env}/groups/{g}", "groups:group", "One group: lag over the last hour, queues, members, verdict.",
          live_s=10),
    Route("/{env}/groups/{g}/clients/{c}", "clients:client",
          "One member, in its own words; `stacks=1` for its threads."),
    Route("/{env}/groups/{g}/explain", "explain:explain_page",
          "Why a message was not consumed: `topic`, and `id`, `key`, or `queue` and `offset`."),
    Route("/{env}/waiting/delays", "waiting:delays",
          "Delay levels, and timed messages by topic and by when they are due.", live_s=10),
    Route("/{env}/filter", "filters:tester",
          "Test a filter, `expression` and `type`, against `properties` or messages of a `topic`, part by part."),
    Route("/{env}/waiting/timed", "waiting:timed",
          "Timed messages one by one, of a `topic`; cancel one, or deliver it now.", posts=True),
    Route("/{env}/waiting/transactions", "waiting:transactions", "Half messages of transactions, by state.", live_s=10),
    Route("/{env}/waiting/pop", "waiting:pop", "Popped messages that are not acknowledged, and until when.", live_s=10),
    Route("/{env}/brokers", "brokers:brokers", "Masters and slaves: version, rates, waits, disk.", live_s=10),
    Route("/{env}/brokers/{b}", "brokers:broker", "One broker: every runtime figure.", live_s=10),
    Route("/{env}/brokers/{b}/store", "brokers:store",
          "Files of the log, what retention deletes next, and when the disk is full.", live_s=60),
    Route("/{env}/brokers/{b}/settings", "brokers:settings",
          "Every setting, explained; `q` filters, `only=changed` or `differs`; compared over all brokers."),
    Route("/{env}/brokers/{b}/settings/edit", "changes:broker_settings",
          "Change settings of a broker: `key` fills one in.", posts=True),
    Route("/{env}/name-servers/edit", "changes:name_server_settings",
          "Change settings of all name servers: `key` fills one in.", posts=True),
    Route("/{env}/name-servers", "brokers:name_servers", "Settings of the name servers, explained and compared."),
    Route("/{env}/ha", "brokers:ha", "Replication: slaves, bytes behind, in sync.", live_s=5),
    Route("/{env}/history", "history:kept", "What is kept over time, where and since when; `figure`, `q`."),
    Route("/{env}/history/{figure}/{name}", "history:series",
          "One series, as JSON its points; `range` from `1h` to `90d`, `until`, as on each page with charts.",
          live_s=30),
    Route("/{env}/alerts", "alerts:alerts", "What fires, rules, channels, what was sent and what waits.", live_s=10),
    Route("/{env}/alerts/{r}", "alerts:rule", "One rule: what it sees; change, silence or delete it.", posts=True),
    Route("/{env}/new-rule", "alerts:new_rule", "Add a rule; `figure` and `selector` fill its form.", posts=True),
    Route("/{env}/channels/{c}", "alerts:channel", "Where notices go: change, test or delete a channel.", posts=True),
    Route("/{env}/new-channel", "alerts:new_channel", "Add a channel: a webhook, mail, or a chat.", posts=True),
    Route("/{env}/clients", "clients:clients", "Producers and consumers: language, version, address, groups.",
          live_s=60),
    Route("/{env}/access", "access:access",
          "Users and policies of ACL 2.0; `user`, `resource`, `action` and `ip` ask what a user may do."),
    Route("/{env}/new-user", "access:new_user", "Create a user.", posts=True),
    Route("/{env}/access/{u}/edit", "access:edit_user", "A user's secret key, type and status.", posts=True),
    Route("/{env}/access/{u}/delete", "access:delete_user", "Delete a user; its name has to be typed.", posts=True),
    Route("/{env}/access/{u}/policy", "access:put_policy", "What a user may do with `resource`.", posts=True),
    Route("/{env}/access/{u}/policy/delete", "access:delete_policy", "Forget the policy on `resource`.", posts=True),
)  # fmt: skip
"""The addresses outside of clusters are first. No cluster can have the name of such an address."""

OUTSIDE = frozenset(route.path.split("/")[1] for route in ROUTES) - {"", "{env}"}
