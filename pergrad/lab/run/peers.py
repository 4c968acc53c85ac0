"""The processes of one run: they meet, and each of them notices if another one ends or is stopped.

The first process listens at the coordinator's address. Each of the others connects to it, says which one
it is, and is told where JAX's own coordinator is when all are there. The connections stay open, and
every process sends signs of life over them, several times in a time-out. A connection that closes means
that its process has ended; silence means that its process is stopped or out of reach. The first process
tells the others.

JAX notices the same, and its C++ part then ends the process with a report of its own. Here one line
tells which process has ended. JAX notices most things later. But if the first process is killed, and
JAX's coordinator with it, the connections to both close at the same time. So the other processes talk to
JAX's coordinator through a `Relay` of their own, which does not close the connection then.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from pergrad.lab.errors import LabError

SIGNS = 6  # of life that a process sends in a time-out
LONGEST = 10_000  # bytes of a message; a longer one does not come from a process of the run
AGAIN = "The same commands again go on from the last checkpoint."


class Peers:
    """The connections of this process: the first one's to all others, or another one's to the first."""

    def __init__(self, process: int, of: int, timeout: float) -> None:
        self.process, self.of, self.timeout = process, of, timeout
        self._connections: dict[int, _Connection] = {}
        self._refused: list[str] = []
        self._lock = threading.Lock()
        self._is_over = threading.Lock()
        self._is_complete = threading.Event()
        self._has_left = threading.Event()
        self._jax_port = 0
        threading.Thread(target=self._show_life, daemon=True).start()

    def gather(self, address: tuple[str, int]) -> int:
        """In the first process: waits for all others, and returns the port for JAX's coordinator."""
        try:
            server, free = _listen(*address), _listen(address[0], 0)
        except OSError as error:
            raise LabError(
                f"the first process cannot listen at {_joined(address)}: {error.strerror or error}. Is "
                "there another one with --process-id 0? Otherwise choose another --coordinator-address."
            ) from error
        with free:
            self._jax_port = free.getsockname()[1]
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        if self.of > 1 and not self._is_complete.wait(self.timeout):
            missing = [str(i) for i in range(1, self.of) if i not in self._connections]
            names = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
            why = "".join(f" A process was refused: {text}." for text in self._refused)
            told = (
                f"{names} of {self.of} did not come to {_joined(address)} within {self.timeout:g} s."
                f"{why} Start all of them, with the same --coordinator-address and --num-processes; "
                "--coordinator-timeout waits longer."
            )
            self._tell({"end": told})
            raise LabError(told)
        for connection in self._connections.values():
            connection.send({"port": self._jax_port})
        return self._jax_port

    def _accept(self, server: socket.socket) -> None:
        while True:
            connected, _ = server.accept()
            connection = _Connection(connected, self.timeout)
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: _Connection) -> None:
        """Accepts a process and listens to it, or refuses it."""
        try:
            hello = connection.receive() or {}
        except OSError:
            hello = {}
        process, of = hello.get("process"), hello.get("of")
        if not isinstance(process, int) or not isinstance(of, int):  # it is no process of the run
            return connection.close()
        with self._lock:
            refusal = None
            if of != self.of:
                refusal = f"process {process} has --num-processes {of}, and the first one has {self.of}"
            elif process in self._connections:
                refusal = f"there is a process with --process-id {process} already"
            if refusal:
                self._refused.append(refusal)
            else:
                self._connections[process] = connection
                if len(self._connections) == self.of - 1:
                    self._is_complete.set()
        if refusal:
            connection.send({"end": f"this process is not let in: {refusal}."})
            return connection.close()
        self._hear(process, connection)

    def come(self, address: tuple[str, int]) -> int:
        """In the other processes: connects to the first, waits for all, and returns the same port."""
        until = time.monotonic() + self.timeout
        while True:
            try:
                connected = socket.create_connection(address, timeout=max(0.1, until - time.monotonic()))
                break
            except OSError as error:
                if time.monotonic() > until or isinstance(error, socket.gaierror):
                    raise LabError(
                        f"process 0 does not answer at {_joined(address)} within {self.timeout:g} s "
                        f"({error.strerror or error}). Start it, with the same --coordinator-address; "
                        "--coordinator-timeout waits longer."
                    ) from error
                time.sleep(0.1)
        connection = _Connection(connected, self.timeout)
        connection.send({"process": self.process, "of": self.of})
        self._connections[0] = connection
        threading.Thread(target=self._hear, args=(0, connection), daemon=True).start()
        self._is_complete.wait()  # `_hear` ends this process if the first one falls silent
        return self._jax_port

    def _hear(self, process: int, connection: _Connection) -> None:
        """Listens to another process until it leaves."""
        try:
            while (message := connection.receive()) is not None:
                if "leaves" in message:
                    return
                if "end" in message:
                    self._end(str(message["end"]))
                if "port" in message:
                    self._jax_port = int(message["port"])
                    self._is_complete.set()
        except TimeoutError:
            self._end(
                f"process {process} has not been heard of for {self.timeout:g} s: it is stopped, or its "
                f"machine cannot be reached. {AGAIN}"
            )
        except OSError:
            pass
        if not self._has_left.is_set():
            self._end(f"process {process} has ended unexpectedly: it was killed, or crashed. {AGAIN}")

    def _show_life(self) -> None:
        while not self._has_left.wait(self.timeout / SIGNS):
            self._tell({"alive": True})

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in list(self._connections.values()):
            connection.send(message)

    def fail(self, why: str) -> None:
        """Tells the others that this process ends, before it does."""
        self._is_over.acquire(timeout=self.timeout)
        self._tell({"end": f"process {self.process} has ended: {why.rstrip('.')}. {AGAIN}"})
        time.sleep(0.2 if self.process == 0 else 0.0)  # they end before JAX misses its coordinator

    def leave(self) -> None:
        """Tells the others that the run is done, so that the end of a process is no error any more."""
        self._has_left.set()
        self._tell({"leaves": True})

    def _end(self, why: str) -> None:
        """Ends this process, even if its main thread waits in C++. The first tells the others why."""
        if self._has_left.is_set() or not self._is_over.acquire(blocking=False):
            return
        if self.process == 0:
            self._tell({"end": why})
            time.sleep(0.2)  # they end before JAX misses its coordinator
        end(f"error: {why}")


def end(line: str) -> None:
    """Says a line, and ends this process at once, whatever its threads do."""
    shown = "\n\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which a progress bar has hidden
    os.write(2, f"{shown}{line}\n".encode())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)


class Relay:
    """Stands between JAX in this process and JAX's coordinator at `address`, and hands on all they send.

    If the coordinator ends, JAX hears nothing more, and would miss its signs of life after a while.
    """

    def __init__(self, address: tuple[str, int], timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._server.accept()
            threading.Thread(target=self._connect, args=(here,), daemon=True).start()

    def _connect(self, here: socket.socket) -> None:
        """Connects to the coordinator, which may not listen yet, and hands on until either ends."""
        until = time.monotonic() + self._timeout
        while True:
            try:
                there = socket.create_connection(self._address, timeout=self._timeout)
                break
            except OSError:
                if time.monotonic() > until:
                    return here.close()  # JAX says then that it does not reach its coordinator
                time.sleep(0.05)
        there.settimeout(None)
        for connected in (here, there):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_hand_on, args=(there, here), daemon=True).start()
        _hand_on(here, there)
        there.close()


def _hand_on(source: socket.socket, to: socket.socket) -> None:
    """Sends all that comes from `source`, until there is no more. The connection `to` stays open."""
    with contextlib.suppress(OSError):
        while got := source.recv(65536):
            to.sendall(got)


class _Connection:
    """A connection to another process. A message is one line with an object in JSON."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.settimeout(timeout)
        self._socket, self._lock, self._rest = connected, threading.Lock(), b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. An error is ignored: the thread that listens to the connection notices it."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None if the connection was closed or the message is not JSON."""
        while b"\n" not in self._rest:
            got = self._socket.recv(4096)
            self._rest += got
            if not got or len(self._rest) > LONGEST:
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        self._socket.close()


def split(address: str) -> tuple[str, int]:
    """`HOST:PORT` in its two parts."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LabError(f"--coordinator-address is HOST:PORT, such as 127.0.0.1:9876, not {address!r}.")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether this host can be reached from its own machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(host: str, port: int) -> socket.socket:
    """Listens on this machine alone if the host is a loopback address, else on all addresses."""
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _joined(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
