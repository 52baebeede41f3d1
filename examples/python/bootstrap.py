"""Shared parts of the examples: their arguments, and a socket that exchanges a few hundred
bytes, in place of an application's own means (etcd, a scheduler, HTTP). Every message is its
length in four bytes, then its content."""

import argparse
import socket
import struct
import time


def main(description, server, client):
    """Runs one side of an example from the command line; otherwise prints the usage."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("server", "client"), help="which of the two to run; start the server first")
    parser.add_argument("host", help="the server's address, for both")
    parser.add_argument("port", type=int, help="the server's port; 0 lets the server take a free one and print it")
    arguments = parser.parse_args()
    side = server if arguments.side == "server" else client
    side(arguments.host, arguments.port)


class Bootstrap:
    """A connection between the two sides of an example."""

    def __init__(self, sock):
        self.sock = sock

    @classmethod
    def serve(cls, host, port):
        """Waits for one client. Port 0 takes a free one; prints the port."""
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
