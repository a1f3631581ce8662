"""A whole router in one object: tokenizer and template, the HTTP app, and the dispatcher with its links. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import time
from collections.abc import Sequence

from starlette.applications import Starlette

from replica.contract.model_files import resolve
from router.app import build_app
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.link import Link, LinkClient, LinkListener, Member
from router.ports import PoolStatus
from router.served_model import ServedModel, load_served_model
from router.status import flat_stats


class RouterServer:
    """start(), serve `app`, update_replicas() whenever membership changes, stop(). All on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        model: str,
        revision: str | None,
        served_name: str,
        router_id: str,
        secret: bytes,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`model` and `revision` as replicas are given them: only tokenizer and template are read."""
        self._config = config
        self._model = model
        self._revision = revision
        self._served_name = served_name
        self._router_id = router_id
        self._secret = secret
        self._tls = tls
        self._dispatcher: Dispatcher | None = None
        self._app: Starlette | None = None

    async def start(self) -> None:
        """Raises ModelError or ValueError, one line for the user."""
        served, revision = await asyncio.to_thread(self._load)
        self._dispatcher = Dispatcher(
            self._config,
            connect=self._connect,
            model=self._served_name,
            revision=revision,
            seed=int.from_bytes(hashlib.blake2b(self._router_id.encode(), digest_size=8).digest(), "little"),
        )
        self._app = build_app(self._dispatcher, served, self._config)

    @property
    def app(self) -> Starlette:
        assert self._app is not None, "not started"
        return self._app

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "not started"
        return self._dispatcher

    def update_replicas(self, members: Sequence[Member]) -> None:
        self.dispatcher.update_replicas(members)

    def status(self) -> PoolStatus:
        return self.dispatcher.status()

    def stats(self) -> dict[str, float]:
        return flat_stats(self.dispatcher.board, time.monotonic())

    async def stop(self) -> None:
        """No new work, streams finish for at most drain_timeout_s, links close. Idempotent."""
        if self._dispatcher is not None:
            await self._dispatcher.stop(self._config.drain_timeout_s)

    def _load(self) -> tuple[ServedModel, str]:
        files = resolve(self._model, self._revision, weights=False)
        path = files.gguf if files.kind == "gguf" else files.directory
        return load_served_model(self._served_name, path), files.revision

    def _connect(self, member: Member, listener: LinkListener) -> Link:
        link = LinkClient(member, router_id=self._router_id, secret=self._secret, listener=listener, tls=self._tls)
        link.start()
        return link
