"""Two nodes: the client sends "Hello" under a tag, the server receives and prints it.

    python hello.py server 127.0.0.1 18515
    python hello.py client 127.0.0.1 18515
"""

import tcpx
from bootstrap import Bootstrap, main

TAG = 99


def server(host, port):
    with tcpx.Session("server") as session, Bootstrap.serve(host, port) as bootstrap:
        bootstrap.send(session.connection_info)
        client = session.accept(timeout=30)
        text = bytearray(64)
        receive = session.recv(client, session.register(text), TAG)
        receive.wait(timeout=30)
        print("server:", text[: receive.received].decode(), flush=True)


def client(host, port):
    with tcpx.Session("client") as session, Bootstrap.connect(host, port) as bootstrap:
        peer = session.add_peer(bootstrap.receive())
        peer.connect(timeout=30)
        session.send(peer, session.register(bytearray(b"Hello")), TAG).wait(timeout=30)
        print("client: sent", flush=True)


if __name__ == "__main__":
    main(__doc__, server, client)
