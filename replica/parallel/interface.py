"""Which network interface carries the ranks' tensors: the one that has this process's own address, unless the user names another."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_NAME_BYTES_MAX = 15


class InterfaceError(Exception):
    """An interface that is named and not there; one line."""


def choose_interface(host: str) -> None:
    """Set the variables gloo and NCCL read, where they are unset. Raises InterfaceError for a name that no interface has.

    Left to itself gloo takes the interface of the host's name, which is the loopback on many machines and never reaches another node.
    """
    names = [name for _, name in socket.if_nameindex()]
    for variable in (GLOO, NCCL):
        given = os.environ.get(variable, "")
        for wanted in given.removeprefix("=").split(",") if given and not given.startswith("^") else ():
            if not any(name == wanted or (variable == NCCL and name.startswith(wanted)) for name in names):
                raise InterfaceError(f"{variable}={given}: no interface {wanted!r} here (there are {', '.join(names)})")
    own = next((name for name in names if address_of(name) == host), None)
    if own is not None:
        os.environ.setdefault(GLOO, own)
        os.environ.setdefault(NCCL, f"={own}")


def address_of(interface: str) -> str | None:
    """Its first IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            answer = fcntl.ioctl(one.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:_NAME_BYTES_MAX]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
