"""Two nodes in asyncio: the client reads layers of a cache from the server, several at a time, and
checks each as soon as it has arrived; the server is notified of each layer while it does other things.

    python async_blocks.py server 127.0.0.1 18515
    python async_blocks.py client 127.0.0.1 18515
"""

import asyncio

import tcpx
from bootstrap import Bootstrap, main

LAYERS, LAYER = 16, 1 << 20


def server(host, port):
    async def serve(session):
        layers = set()
        async for note in session.notifications():
            layers.add(int(note.message))
            if len(layers) == LAYERS:
                print(f"server: {note.sender} has all {LAYERS} layers", flush=True)
                return

    cache = bytearray(b"".join(bytes([layer]) * LAYER for layer in range(LAYERS)))
    with tcpx.Session("prefill") as session, Bootstrap.serve(host, port) as bootstrap:
        region = session.register(cache)
        bootstrap.send(session.connection_info)
        bootstrap.send(region.descriptor)
        asyncio.run(asyncio.wait_for(serve(session), 30))


def client(host, port):
    async def fetch(session, peer, mine, theirs, cache, layer):
        offset = layer * LAYER
        # Cancelling this task aborts its read.
        await session.read(peer, [(mine, offset, theirs, offset, LAYER)], notify=b"%d" % layer)
        assert cache.count(layer, offset, offset + LAYER) == LAYER, "a byte is wrong"

    async def fetch_all(session, peer, theirs):
        cache = bytearray(b"\xff" * (LAYERS * LAYER))
        mine = session.register(cache)
        await asyncio.gather(*(fetch(session, peer, mine, theirs, cache, layer) for layer in range(LAYERS)))

    with tcpx.Session("decode") as session, Bootstrap.connect(host, port) as bootstrap:
        peer = session.add_peer(bootstrap.receive())
        theirs = tcpx.RemoteRegion(bootstrap.receive())
        asyncio.run(asyncio.wait_for(fetch_all(session, peer, theirs), 30))
        print(f"client: {LAYERS} layers, all right", flush=True)


if __name__ == "__main__":
    main(__doc__, server, client)
