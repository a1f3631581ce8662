"""The Serve deployment of one router: the HTTP API behind Serve's ingress, and links to all replicas."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster import ingress, membership, telemetry
from cluster.config import Config
from cluster.drain_gate import DrainGate
from router.link import Member


class Router:
    """Serve calls `__serve_build_asgi_app__` after the constructor; HAProxy then sends it requests."""

    async def __init__(self, config: Config, secret: bytes, replicas: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._router_id = serve.get_replica_context().replica_id.unique_id
        telemetry.configure(config.serve, process=f"router {self._router_id}")
        self._log = telemetry.logger().bind(model=config.model_name, router=self._router_id)
        from router.server import RouterServer

        engine = config.engine
        self._server = RouterServer(
            config.router,
            model=engine.model,
            revision=engine.revision,
            served_name=config.model_name,
            router_id=self._router_id,
            secret=secret,
        )
        await self._server.start()
        self._gate = DrainGate(self._server.app)
        self._loop = asyncio.get_running_loop()
        ingress.attach(self._gate)
        membership.follow(replicas, self._from_any_thread)
        gc.collect()
        gc.freeze()  # what is there now stays: a collection in the middle of a burst need not look at it
        self._log.info("router ready")

    def __serve_build_asgi_app__(self) -> DrainGate:
        return self._gate

    async def drain(self, timeout_s: float) -> bool:
        """Let nothing new in; True once the last request has left, False if that takes longer."""
        self._gate.close()
        return await self._gate.wait_idle(timeout_s)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._server.stats().items() if isinstance(value, int | float)}

    async def stats(self) -> dict[str, Any]:
        return {"router_id": self._router_id, **self._server.stats()}

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is None:  # the constructor failed
            return
        del self._server
        await server.stop()
        self._log.info("router stopped")

    def _from_any_thread(self, members: tuple[Member, ...]) -> None:
        self._loop.call_soon_threadsafe(self._set_members, members)

    def _set_members(self, members: tuple[Member, ...]) -> None:
        if getattr(self, "_server", None) is not None:
            self._server.update_replicas(members)
            self._log.info("replicas", count=len(members), ids=[member.replica_id for member in members])
