"""A TCP proxy that is slow, cuts, or speaks TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time


class Proxy:
    """Passes bytes on between clients and `127.0.0.1:PORT`.

    Attributes:
        delay_s: before each piece of an answer.
        cut_answers_after, cut_requests_after: bytes of one connection, after which it is cut; None: never.
        num_cut: connections cut so far.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target, self._tls = port, tls
        self.delay_s = 0.0
        self.cut_answers_after: int | None = None
        self.cut_requests_after: int | None = None
        self.num_cut = 0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open |= {client, server}
            threading.Thread(target=self._pass_on, args=(client, server, True), daemon=True).start()
            self._pass_on(server, client, False)

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(65536):
                if not is_request:
                    time.sleep(self.delay_s)
                limit = self.cut_requests_after if is_request else self.cut_answers_after
                passed += len(data)
                if limit is not None and passed > limit:
                    sink.sendall(data[: max(0, len(data) - (passed - limit))])
                    self.num_cut += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            self._open.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """Every connection, now."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()
