"""Ray sometimes reports the actor as unavailable though it is not dead: the broker tries again, or replaces the actor."""

import math
import os
import threading
from types import SimpleNamespace

import pytest

from autotune.launchers.ray import broker
from tests.ray.private import why_not

if why := why_not():
    pytest.skip(why, allow_module_level=True)


def unavailable():
    import ray  # not at the top: every worker of pytest would import it

    return ray.exceptions.ActorUnavailableError("The actor is temporarily unavailable", None)


class Flaky:
    """An actor in this process. The first attempt of each call does not reach it; the answer to the second attempt is lost."""

    def __init__(self, actor):
        self._actor, self._tries = actor, {}

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *arguments: lambda: self._call(name, arguments))

    def _call(self, name, arguments):
        key = (name, *map(str, arguments))
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._tries[key] == 1:
            raise unavailable()
        answer = getattr(self._actor, name)(*arguments)
        if self._tries[key] == 2:
            raise unavailable()
        return answer


class Inbox:
    """The chunks that the tuner sends, and then nothing."""

    closed_s = math.inf

    def __init__(self, chunks):
        self._chunks = iter(chunks)

    def take(self):
        return next(self._chunks, b"")


@pytest.fixture
def local_ray(monkeypatch):
    """Runs actors' methods in this process."""
    import ray

    context = SimpleNamespace(get_accelerator_ids=lambda: {}, get_job_id=lambda: "01")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    fake = SimpleNamespace(get=lambda call, **_: call(), exceptions=ray.exceptions)
    monkeypatch.setattr(broker, "ray", fake, raising=False)
    monkeypatch.setattr(broker, "RETRY_S", 0.001)
    return fake


def test_every_byte_arrives_once_even_if_the_actor_is_often_unavailable(local_ray, tmp_path):
    (actor := broker.Relay()).start(["/bin/cat"], broker.inherited())  # an agent that sends back what it gets
    relay, chunks = Flaky(actor), [os.urandom(size) for size in (1, 70_000, 4096, 300_000, 17)]
    inbox = Inbox(chunks)
    with (tmp_path / "out").open("wb") as out:
        sending = threading.Thread(target=broker.send, args=(relay, inbox))
        sending.start()
        broker.receive(relay, inbox, out.fileno())
        sending.join()
    assert (tmp_path / "out").read_bytes() == b"".join(chunks)
    actor._log.close()


def test_an_actor_that_is_unavailable_at_the_start_is_replaced_by_another(local_ray, monkeypatch):
    made, killed = [], []

    def start():
        if len(made) == 1:
            raise unavailable()

    def make():
        made.append(SimpleNamespace(start=SimpleNamespace(remote=lambda *_: start)))
        return made[-1]

    local_ray.remote = lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))
    local_ray.wait = lambda calls, timeout: (calls, [])
    local_ray.kill = killed.append
    monkeypatch.setattr(broker, "wanted", lambda _: {"CPU": 1, "GPU": 0})
    monkeypatch.setattr(broker, "leave", lambda *_, **told: pytest.fail(str(told)))
    assert broker.started({"agent": []}, Inbox([])) is made[1]
    assert killed == made[:1]
