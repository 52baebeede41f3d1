"""A socket that passes a few hundred bytes on: it stands for whatever an application has for that (etcd, a
scheduler, HTTP). Every message is its length in four bytes, then itself."""

import socket
import struct
import time


class Bootstrap:
    def __init__(self, sock):
        self.sock = sock

    @classmethod
    def serve(cls, host, port):
        """Waits for one client. Port 0 takes a free one; the port is printed."""
        with socket.create_server((host, port)) as listener:
            print("server: listening on port", listener.getsockname()[1], flush=True)
            return cls(listener.accept()[0])

    @classmethod
    def connect(cls, host, port):
        """Connects to the server, which may still be starting."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return cls(socket.create_connection((host, port)))
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def send(self, message):
        self.sock.sendall(struct.pack("!I", len(message)) + message)

    def receive(self):
        return self._exactly(*struct.unpack("!I", self._exactly(4)))

    def _exactly(self, length):
        message = b""
        while len(message) < length:
            part = self.sock.recv(length - len(message))
            if not part:
                raise ConnectionError("the other side has gone")
            message += part
        return message

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()
