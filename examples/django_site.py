"""A Django site that sends, without an event loop, also when its server forks.

    NAMESRV_ADDR=127.0.0.1:9876 python examples/django_site.py runserver
    gunicorn --preload --workers 4 --chdir examples django_site:application

``python examples/django_site.py [HOST:PORT of a name server]`` makes two requests of its own, and ends. The producer is
made at the first request, so every worker process has one of its own; it closes with the process.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import path

from rmqkit import RmqError, sync

settings.configure(DEBUG=True, ROOT_URLCONF=__name__, SECRET_KEY="of an example", ALLOWED_HOSTS=["*"])
application = get_wsgi_application()


@functools.cache
def producer() -> sync.Producer:
    made = sync.Producer("django-site", os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876"))
    made.start()
    atexit.register(made.close)
    return made


def sign_up(request: HttpRequest, name: str) -> JsonResponse:
    try:
        result = producer().send("SignUps", name.encode())
    except RmqError as error:
        return JsonResponse({"error": str(error)}, status=503)
    return JsonResponse({"status": result.status.name, "offset": result.queue_offset})


urlpatterns = [path("sign-up/<name>", sign_up)]


def try_it() -> None:
    for name in ("ada", "grace"):
        print(Client().get(f"/sign-up/{name}").json()["status"])


if __name__ == "__main__":
    if len(sys.argv) > 1 and ":" not in sys.argv[1]:
        from django.core.management import execute_from_command_line

        execute_from_command_line(sys.argv)
    else:
        if len(sys.argv) > 1:
            os.environ["NAMESRV_ADDR"] = sys.argv[1]
        try_it()
