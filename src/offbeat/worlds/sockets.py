"""The sockets behind our process groups: how they are cut, and why a forked child lets go of them.

Who is blocked in a collective that will never end comes out when its connections are cut. Dropping
the group does not do it: a collective under way keeps the connections open, on both sides.

A worker's end is seen by its neighbour when the kernel closes its connections. A child that was
forked meanwhile, a worker of a DataLoader say, has copies of them, and keeps them open until it
ends itself. Gloo does not tell its sockets. So we look at which ones are there before and after it
makes a group. After a fork the child replaces its copies, and those of the job's store, by
/dev/null: the numbers stay taken, so that nothing which believes to own one closes another's file.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_Identity = tuple[int, int]
Sockets = dict[int, _Identity]
"""By file descriptor. Numbers are used again, the identity is not."""
_ours: Sockets = {}  # by file descriptor; those that have been closed since, too
_store_ports: set[int] = set()
_left_alone: set[_Identity] = set()
_noting: list[list[bool]] = []  # by thread that notes sockets: whether no other does meanwhile
_of_several: set[_Identity] = set()
_half_cut: list[socket.socket] = []  # copies, which keep the connections open: see `cut`


@contextmanager
def noting() -> Iterator[Sockets]:
    """Note as ours the sockets that are opened in this block; they are in the result after it.

    Where several threads do so at a time, each has those of the others, too: `end` leaves them out.
    """
    with suppress(IndexError):  # another thread does the same
        while True:
            _half_cut.pop().close()
    alone = [not _noting]
    for other in list(_noting):
        other[0] = False
    _noting.append(alone)
    before, new = _open_sockets(), Sockets()
    try:
        yield new
    finally:
        _noting.remove(alone)
        after = _open_sockets()
        _of_several.intersection_update(list(after.values()))
        for fd, identity in list(_ours.items()):
            if after.get(fd) != identity:
                _ours.pop(fd, None)
        for fd, identity in after.items():
            if before.get(fd) != identity:
                _ours[fd] = new[fd] = identity
                if not alone[0]:
                    _of_several.add(identity)
                with suppress(OSError):
                    os.set_inheritable(fd, False)  # nor should a program that is started have it


def leave_alone(one: socket.socket) -> None:
    """Never cut this one, though it was opened while a thread of ours noted those of a group."""
    status = os.fstat(one.fileno())
    _left_alone.add((status.st_dev, status.st_ino))


def cut(sockets: Sockets) -> None:
    """Have Gloo find connections ended; those that have been closed since are left out.

    Only for reading, and the other side does not see it yet: when Gloo fails to *write*, it forgets
    to tell whoever waits for that. Everybody is told of a loss, and cuts its own side.

    Not the sockets that listen: Gloo takes their end for a fault of its own, and ends the process.
    Nor those to the job's store, which other threads may have opened while these were noted.
    """
    for copy in _still_open(sockets, listening=False):
        if _is_the_stores(copy.fileno()):
            copy.close()
            continue
        with suppress(OSError):
            copy.shutdown(socket.SHUT_RD)
        _half_cut.append(copy)


def end(sockets: Sockets, ports: set[int]) -> None:
    """All are through: have Gloo find those connections ended that came in by these ports.

    Only those, since they are Gloo's for sure: another thread of the program may have opened one of
    its own while we noted sockets. The other side finds its end of them closed then. And only those
    that are no other group's.
    """
    mine = {fd: identity for fd, identity in sockets.items() if identity not in _of_several}
    for copy in _still_open(mine, listening=False):
        with copy, suppress(OSError):
            if copy.getsockname()[1] in ports:
                copy.shutdown(socket.SHUT_RD)


def addresses(host: str) -> set[str]:
    """By which a host is known."""
    with suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    return {host}


def cut_towards(hosts: set[str], port: int) -> None:
    """End every connection of this process to a port of a host: who waits there gets an error."""
    for copy in _towards(hosts, port):
        with suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)


def is_connected_to(hosts: set[str], port: int) -> bool:
    """Whether a connection of this process to a port of a host has surely not ended.

    It is looked at from outside: a thread that waits there, perhaps for long, does not notice.
    """
    if socket.getdefaulttimeout() is not None:  # a copy would have the original not block any more
        return False
    return any(map(_is_open, _towards(hosts, port)))


def _is_open(one: socket.socket) -> bool:
    with suppress(OSError):
        try:
            return bool(one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:  # nothing to read
            return True
    return False


def _towards(hosts: set[str], port: int) -> Iterator[socket.socket]:
    """Copies of all connections of this process to a port of a host, one after the other."""
    for fd in _open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                host, its_port = copy.getpeername()[:2]
                if its_port == port and host.removeprefix("::ffff:") in hosts:
                    yield copy


def listening_ports(sockets: Sockets) -> set[int]:
    """The ports that some of these listen at."""
    ports = set()
    for copy in _still_open(sockets, listening=True):
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                ports.add(copy.getsockname()[1])
    return ports


def _still_open(sockets: Sockets, listening: bool) -> Iterator[socket.socket]:
    """Copies of those that have not been closed since, and listen or do not: to be closed."""
    for fd, identity in sockets.items():
        if identity in _left_alone:
            continue
        with suppress(OSError):
            copy = socket.socket(fileno=os.dup(fd))
            status = os.fstat(copy.fileno())
            listens = bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if (status.st_dev, status.st_ino) == identity and listens == listening:
                yield copy
            else:
                copy.close()


def note_store(port: int) -> None:
    """Note the port of the job's store: connections to it come and go, and some are torch's."""
    _store_ports.add(port)


def own_address() -> str:
    """The address by which this host reaches the job's store, and others this host."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with suppress(OSError):
        family, kind, *_, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _open_sockets() -> Sockets:
    found = {}
    for name in Path("/dev/fd").iterdir() if Path("/dev/fd").exists() else ():
        with suppress(OSError, ValueError):  # the one that lists them is closed by now
            status = os.fstat(fd := int(name.name))
            if stat.S_ISSOCK(status.st_mode):
                found[fd] = (status.st_dev, status.st_ino)
    return found


def _is_the_stores(fd: int) -> bool:
    """Whether a socket leads to the job's store, or is the store's own."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        for ask in (copy.getsockname, copy.getpeername):
            with suppress(OSError):
                if ask()[1] in _store_ports:
                    return True
    return False


def _let_go_in_child() -> None:
    if not _ours:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, identity in _open_sockets().items():
        with suppress(OSError):
            if _ours.get(fd) == identity or _is_the_stores(fd):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _ours.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
