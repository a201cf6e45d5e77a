"""What a trainer sleeps on: the sockets of its workers, and the descriptors by which their crew makes itself heard.

A descriptor is taken out before it is closed, and a crew's are compared as soon as the crew has been asked: a number
that is closed and opened again for another worker must not be taken out in the place of the old one.
"""

from __future__ import annotations

import select

from headrace.loader.link import Link


class Watch:
    """One poll set. Used with the pool's lock held."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self._links: dict[int, Link] = {}
        self._crew_fds: list[int] = []

    def add(self, link: Link) -> None:
        """Wake up for what this worker says."""
        fd = link.channel.fileno()
        self._links[fd] = link
        self._poller.register(fd, select.POLLIN)

    def drop(self, link: Link) -> None:
        """No more: it is let go, or has closed its end. May be called again."""
        fd = link.channel.fileno()
        if self._links.get(fd) is link:
            del self._links[fd]
            self._poller.unregister(fd)

    def follow_crew(self, fds: list[int]) -> None:
        """Wake up for these descriptors of the crew, and for none that it has had before."""
        if fds == self._crew_fds:
            return
        for fd in self._crew_fds:
            if fd not in fds and fd not in self._links:
                self._poller.unregister(fd)
        for fd in fds:
            self._poller.register(fd, select.POLLIN)
        self._crew_fds = fds

    def sleep(self, limit_ms: int | None) -> tuple[list[Link], bool] | None:
        """Block until something can be read.

        Returns:
            The workers that have something to say or have closed their end, and whether the crew has; None when
            ``limit_ms`` passed without that.
        """
        ready = [fd for fd, _ in self._poller.poll(limit_ms)]
        if not ready:
            return None
        links = [self._links[fd] for fd in ready if fd in self._links]
        return links, len(links) < len(ready)
