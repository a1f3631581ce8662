"""How a router learns which replicas there are: the only file that knows Serve's request routers.

Serve tells every handle's request router the running replicas of a deployment, with what each has published. Requests
never go through the handle; the subclass here only listens. Serve may call it on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router.link import Member

Listener = Callable[[tuple[Member, ...]], None]
"""Must not block, nor call back into this module."""

_lock = threading.Lock()
_known: dict[str, tuple[Member, ...]] = {}  # deployment → its running replicas; one entry per deployment of this process
_listeners: dict[str, Listener] = {}


def publish(host: str, port: int) -> dict[str, Any]:
    """What a replica's `record_replica_metadata` returns: the address of its link."""
    return {"link_host": host, "link_port": port}


def follow(replicas: DeploymentHandle[Any], listener: Listener) -> None:
    """Call `listener` with all running replicas, now if they are known and after every change, in this loop or another thread.

    A replica that is missing from a later call is leaving or dead: no new work for it.
    """
    with _lock:
        _listeners[str(replicas.deployment_id)] = listener
        members = _known.get(str(replicas.deployment_id))
        if members is not None:
            listener(members)
    replicas.options(method_name="stats")  # makes the handle start listening to the controller


class LinkMembership(RequestRouter):  # type: ignore[misc]
    """Serve's request router of the Replica deployment. Passes on who is there; chooses only for control calls.

    Serve ships this class *by value*: its module's globals would be copies. So it reaches the real ones by an import.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from cluster import membership

        super().update_replicas(replicas)
        membership.announce(self._deployment_id, {replica.replica_id.unique_id: replica.replica_metadata for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [sorted(candidate_replicas, key=lambda replica: str(replica.replica_id.unique_id))]


def announce(deployment_id: object, published: Mapping[str, Mapping[str, Any]]) -> None:
    """Remember who is there and tell the listener, if anything changed."""
    members = members_of(published)
    with _lock:
        if _known.get(str(deployment_id)) == members:
            return
        _known[str(deployment_id)] = members
        listener = _listeners.get(str(deployment_id))
        if listener is not None:  # under the lock: of two changes the later is heard last
            listener(members)


def members_of(published: Mapping[str, Mapping[str, Any]]) -> tuple[Member, ...]:
    """Those that have published a link address, by id."""
    return tuple(
        Member(replica_id=replica_id, host=str(data["link_host"]), port=int(data["link_port"]))
        for replica_id, data in sorted(published.items())
        if "link_host" in data and "link_port" in data
    )
