"""One router as a process of its own, without Ray: `python -m bench.router_process PORT…` prints its own port.

Its members are the replicas (bench.link_mock) at these ports. The HTTP server is set up as Serve's is: uvicorn with uvloop and
httptools, and requests for tokens take the shortcut that they take there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import socket
import sys

import structlog
import uvicorn
import uvloop

from bench.link_mock import SECRET
from cluster import ingress
from cluster.drain_gate import DrainGate
from router.config import RouterConfig
from router.link import Member
from router.server import RouterServer

CONNECT_TIMEOUT_S = 20.0


async def serve(ports: list[int]) -> None:
    router = RouterServer(
        RouterConfig(), model="smollm2", revision=None, served_name="smollm2", router_id=f"bench-{os.getpid()}", secret=SECRET
    )
    await router.start()
    router.update_replicas([Member(f"r{number}", "127.0.0.1", port) for number, port in enumerate(ports)])
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        while router.status().replicas < len(ports):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)  # whoever reads the port may connect at once
    ingress.attach(DrainGate(router.app))
    settings = uvicorn.Config(
        ingress.Shortcut(router.app), loop="none", http="httptools", log_level="warning", access_log=False, lifespan="off", backlog=2048
    )
    gc.collect()
    gc.freeze()
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(settings).serve([listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=int, nargs="+", help="of the replicas")
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout says the port, and nothing else
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
