"""How HAProxy is started: through a program of ours, which ties its life to its parent's and mends what Serve has written for it."""

from __future__ import annotations

import sys
from pathlib import Path

HEADER_SECONDS_MAX = 30  # until a request's headers have arrived
_ERROR_PAGE = "500.http"  # written by Serve beside HAProxy's configuration: the answer in place of 502, 503 and 504
_GONE = b'{"error":{"message":"no router answers","type":"server_error","param":null,"code":"router_gone"}}'
ROUTER_GONE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\ncache-control: no-cache\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n%b" % (len(_GONE), _GONE)
)
MENDED = (  # of a configuration: after which line of Serve's which one of ours comes
    ("defaults\n", f"    timeout http-request {HEADER_SECONDS_MAX}s\n"),
    (
        "backend default_backend\n",
        "    http-request return status 503 content-type application/json hdr retry-after 1 "
        f"string '{_GONE.decode()}' if {{ path_beg / }}\n",
    ),
)


def mortal(binary: Path, wrapper: Path) -> Path:
    """Write `wrapper`, which runs `binary` so that the kernel ends it when its parent dies, however that happens.

    Serve starts HAProxy as a child of an actor and cannot end it when the actor itself is killed. Mended are four things: what
    Serve lets HAProxy say of a router that is gone, a bare 500, is made an error like the others, which clients try again; so
    is its 404 for every path as long as it knows no router; headers that never end are given up; and nothing is spliced (-dS),
    because a HAProxy that has spliced a request's body does not notice when that client leaves before its answer begins.
    """
    wrapper.write_text(
        f"#!{sys.executable} -IS\n"
        "import ctypes, os, signal, sys\n"
        "for flag, config in zip(sys.argv, sys.argv[1:]):\n"
        f"    page = os.path.join(os.path.dirname(config), {_ERROR_PAGE!r})\n"
        "    if flag == '-f' and os.path.exists(page):\n"
        "        with open(page, 'wb') as file:\n"
        f"            file.write({ROUTER_GONE!r})\n"
        "    if flag == '-f' and os.path.exists(config):\n"
        "        with open(config) as file:\n"
        "            text = mended = file.read()\n"
        f"        for line, ours in {MENDED!r}:\n"
        "            if ours not in mended:\n"
        "                mended = mended.replace('\\n' + line, '\\n' + line + ours)\n"
        "        if mended != text:\n"
        "            with open(config, 'w') as file:\n"
        "                file.write(mended)\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG\n"
        "unspliced = ['-dS'] if '-f' in sys.argv else []\n"
        f"os.execv({str(binary)!r}, [{str(binary)!r}, *unspliced, *sys.argv[1:]])\n"
    )
    wrapper.chmod(0o700)
    return wrapper
