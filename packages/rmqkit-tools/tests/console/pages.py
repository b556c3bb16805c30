"""The pages that the shop of `tests.console.world` can show, by name."""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request

ENV = "local"


def pages(broker: str) -> dict[str, str]:
    """Path of each page by a name for its picture; ``broker`` is the broker's name."""
    at = f"/{ENV}"
    return {
        "overview": f"{at}/",
        "search": f"{at}/search?q=ship",
        "topics": f"{at}/topics",
        "topics-none": f"{at}/topics?q=nothing-like-it",
        "topic": f"{at}/topics/Orders",
        "topic-empty": f"{at}/topics/Empty-Topic",
        "messages": f"{at}/topics/Orders/messages",
        "messages-none": f"{at}/topics/Orders/messages?tags=unknown",
        "tail": f"{at}/topics/Orders/tail",
        "send": f"{at}/topics/Orders/send",
        "lite": f"{at}/topics/Chat-Sessions/lite",
        "lite-prefix": f"{at}/topics/Chat-Sessions/lite?q=session-01",
        "lite-topic": f"{at}/topics/Chat-Sessions/lite/session-0003",
        "lite-explain": f"{at}/topics/Chat-Sessions/lite/session-0002/explain?group=chat-answers",
        "delete-lite": f"{at}/topics/Chat-Sessions/lite/session-0003/delete",
        "message": f"{at}/topics/Orders/at/{broker}/0/0",
        "message-binary": f"{at}/topics/Shipping-Events/m/{{binary}}",
        "groups": f"{at}/groups",
        "group": f"{at}/groups/billing",
        "group-behind": f"{at}/groups/warehouse",
        "group-offline": f"{at}/groups/mailer",
        "client": f"{at}/groups/billing/clients/{{client}}",
        "explain": f"{at}/groups/warehouse/explain",
        "explain-answer": f"{at}/groups/warehouse/explain?topic=Orders&key=order-3",
        "brokers": f"{at}/brokers",
        "broker": f"{at}/brokers/{broker}",
        "store": f"{at}/brokers/{broker}/store",
        "settings": f"{at}/brokers/{broker}/settings?only=changed",
        "name-servers": f"{at}/name-servers",
        "ha": f"{at}/ha",
        "clients": f"{at}/clients",
        "filter": f"{at}/filter",
        "filter-parts": f"{at}/filter?expression=amount+BETWEEN+10+AND+50+AND+country+IN+('DE','AT')&topic=Orders",
        "delays": f"{at}/waiting/delays",
        "timed": f"{at}/waiting/timed",
        "transactions": f"{at}/waiting/transactions",
        "pop": f"{at}/waiting/pop",
        "history": f"{at}/history",
        "series": f"{at}/history/lag/warehouse",
        "series-week": f"{at}/history/lag/warehouse?range=7d",
        "alerts": f"{at}/alerts",
        "rule": f"{at}/alerts/behind",
        "new-rule": f"{at}/new-rule",
        "channel": f"{at}/channels/hook",
        "new-topic": f"{at}/new-topic",
        "delete-topic": f"{at}/topics/Orders/delete",
        "edit-group": f"{at}/groups/mailer/edit",
        "offsets": f"{at}/groups/warehouse/offsets",
        "dead": f"{at}/dead",
        "dead-kinds": f"{at}/groups/refunds/dead",
        "jobs": f"{at}/jobs",
        "edit-settings": f"{at}/brokers/{broker}/settings/edit?key=flushIntervalCommitLog",
        "access": f"{at}/access",
        "new-user": f"{at}/new-user",
        "audit": "/audit",
        "about": "/about",
        "not-found": f"{at}/topics/Ordres",
    }


def known(base: str) -> dict[str, str]:
    """The pages of a console at an address, with the names that its cluster has."""
    brokers = fetch(base, f"/{ENV}/brokers")["brokers"]
    binary = fetch(base, f"/{ENV}/topics/Shipping-Events/messages")["messages"][0]["msgId"]
    client = fetch(base, f"/{ENV}/groups/billing")["members"][0]["id"]
    found = pages(brokers[0]["brokerName"])
    return {
        name: path.format(binary=binary, client=urllib.request.quote(client, safe="")) for name, path in found.items()
    }


def make_rules(base: str) -> None:
    """A channel to which nobody listens, a rule that fires, one that does not."""
    at = f"{base.rstrip('/')}/{ENV}"
    rule = {"figure": "lag", "selector": "*", "operator": ">", "value": "5", "samples": "1", "channel": "hook"}
    for path, form in (
        ("new-channel", {"name": "hook", "url": "http://127.0.0.1:9/in?key=1", "secret": "x"}),
        ("new-rule", {"name": "behind", **rule}),
        ("new-rule", {"name": "disk", **rule, "figure": "disk", "value": "0.999"}),
    ):
        text = _post(f"{at}/{path}", form)
        found = re.search(r'name="review" value="([^"]+)"', text)
        assert found, text
        _post(f"{at}/{path}", {"review": found[1]})


def _post(address: str, form: dict[str, str]) -> str:
    request = urllib.request.Request(address, urllib.parse.urlencode(form).encode(), {"sec-fetch-site": "same-origin"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def fetch(base: str, path: str) -> dict:
    """A page as JSON."""
    request = urllib.request.Request(base.rstrip("/") + path, headers={"accept": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
