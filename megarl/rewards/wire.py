"""Messages between the pool and its processes: a length of 4 bytes, then JSON. Never pickle: the other end runs a user's code."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

from megarl.errors import DataError, explain

MAX_MESSAGE_BYTES = 64 * 2**20
LENGTH = struct.Struct(">I")
CHECK_EVERY_S = 0.1  # how often a waiting parent looks whether the process still lives


class Closed(Exception):
    """The other end is gone."""


class Garbled(Exception):
    """What arrived is no message: something else wrote to the pipe."""


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of ``message``. NaN and infinity travel as JSON's common extension.

    Raises:
        DataError: a value that JSON can't hold.
    """
    try:
        body = json.dumps(message).encode()
    except (TypeError, ValueError) as error:
        raise DataError(explain("a value that can't be sent to the reward process", got=error, expected="JSON values")) from error
    return LENGTH.pack(len(body)) + body


def read_blocking(fd: int) -> dict[str, Any] | None:
    """The next message (child's side); None when the parent closed the pipe."""
    head = _read_exactly(fd, LENGTH.size)
    if head is None:
        return None
    body = _read_exactly(fd, LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def write_blocking(fd: int, message: dict[str, Any]) -> None:
    """Send ``message`` (child's side)."""
    data = memoryview(encode(message))
    while data:
        data = data[os.write(fd, data) :]


def _read_exactly(fd: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            return None
        data += part
    return data


class ParentEnd:
    """The pool's side of one process's pipes; every wait ends at a deadline or at the process's death.

    Args:
        write_fd, read_fd: pipe ends of the parent; they are made non-blocking.
        alive: whether the process lives. Needed beside end-of-file: a grandchild may hold the pipe open.
    """

    def __init__(self, write_fd: int, read_fd: int, alive: Callable[[], bool]):
        self._write_fd, self._read_fd, self._alive = write_fd, read_fd, alive
        os.set_blocking(write_fd, False)
        os.set_blocking(read_fd, False)
        self._buffer = bytearray()

    def send(self, message: dict[str, Any], deadline: float) -> None:
        """Raises TimeoutError at ``deadline`` (time.monotonic), Closed when the process is gone."""
        data = memoryview(encode(message))
        while data:
            self._wait(self._write_fd, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._write_fd, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise Closed from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError, Closed, or Garbled."""
        body = None
        while body is None:
            self._wait(self._read_fd, select.POLLIN, deadline)
            part = os.read(self._read_fd, 2**16)
            if not part:
                raise Closed
            self._buffer += part
            body = self._take_body()
        try:
            message = json.loads(body)
        except ValueError as error:
            raise Garbled from error
        if not isinstance(message, dict):
            raise Garbled
        return message

    def _take_body(self) -> bytes | None:
        """The first whole message of the buffer."""
        if len(self._buffer) < LENGTH.size:
            return None
        (count,) = LENGTH.unpack_from(self._buffer)
        if count > MAX_MESSAGE_BYTES:
            raise Garbled
        if len(self._buffer) < LENGTH.size + count:
            return None
        body = bytes(self._buffer[LENGTH.size : LENGTH.size + count])
        del self._buffer[: LENGTH.size + count]
        return body

    def _wait(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if poll.poll(min(remaining, CHECK_EVERY_S) * 1000):
                return
            if not self._alive() and not poll.poll(0):  # what it wrote before it died still counts
                raise Closed
