"""The sockets of a server, taken before its model is loaded: a port in use shows at once."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence

from guided_spec.errors import ConfigError, reason_of

_BACKLOG = 2048  # connections that wait to be taken, as uvicorn has it
_REASONS = {
    errno.EADDRINUSE: "is in use on {host}: end what listens there, or take another; 0 is any free "
    "one",
    errno.EACCES: "needs rights that this user lacks; ports from 1024 on need none",
}


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of a host; nobody can connect before ``listen``.

    port: 0 takes a free one, the same for all. Raises ConfigError for a host or a port that cannot
    be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _no_host(host, error) from error
    taken: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            taken.append(one)
            _share(one, is_shared=True)  # with connections that a server before has closed
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            _share(one, is_shared=False)  # not with another that does not listen yet either
            port = one.getsockname()[1]
    except OSError as error:
        close(taken)
        if error.errno not in _REASONS:
            raise _no_host(host, error) from error
        reason = _REASONS[error.errno].format(host=host)
        raise ConfigError("port", port, reason) from error
    return taken


def listen(sockets: Iterable[socket.socket]) -> None:
    """Let clients connect; they wait until they are served."""
    for one in sockets:
        _share(one, is_shared=True)
        one.listen(_BACKLOG)


def address(host: str, sockets: Sequence[socket.socket]) -> str:
    """Where they can be reached, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{sockets[0].getsockname()[1]}"


def close(sockets: Iterable[socket.socket]) -> None:
    """Give the port back."""
    for one in sockets:
        one.close()


def _share(one: socket.socket, *, is_shared: bool) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(is_shared))


def _no_host(host: str, error: Exception) -> ConfigError:
    fix = "127.0.0.1 is for this machine alone, 0.0.0.0 for all networks"
    return ConfigError("host", host, f"is no address of this machine ({reason_of(error)}); {fix}")
