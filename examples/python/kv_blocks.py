"""Two nodes: the client reads scattered KV blocks from the server's memory, then notifies it. The
server's program only waits.

    python kv_blocks.py server 127.0.0.1 18515
    python kv_blocks.py client 127.0.0.1 18515
"""

import time

import numpy as np
import tcpx
from bootstrap import Bootstrap, main

BLOCK, BLOCKS = 16 << 10, 4096


def server(host, port):
    cache = np.repeat(np.arange(BLOCKS) % 251, BLOCK).astype(np.uint8)
    with tcpx.Session("prefill") as session, Bootstrap.serve(host, port) as bootstrap:
        region = session.register(cache)
        bootstrap.send(session.connection_info)
        bootstrap.send(region.descriptor)
        note = session.wait_notification(timeout=30)
        print(f'server: {note.sender} says "{note.message.decode()}"', flush=True)


def client(host, port):
    cache = np.zeros(BLOCKS * BLOCK, dtype=np.uint8)
    with tcpx.Session("decode") as session, Bootstrap.connect(host, port) as bootstrap:
        peer = session.add_peer(bootstrap.receive())
        theirs = tcpx.RemoteRegion(bootstrap.receive())
        mine = session.register(cache)
        # Visits the blocks in another order: the stride reaches each of them once.
        order = np.arange(BLOCKS) * 1001 % BLOCKS
        transfer = session.prepare_blocks("read", peer, mine, np.arange(BLOCKS) * BLOCK, theirs, order * BLOCK, BLOCK)
        begin = time.perf_counter()
        transfer.post(notify=b"I have all blocks")
        transfer.wait(timeout=30)
        seconds = time.perf_counter() - begin
        assert (cache.reshape(BLOCKS, BLOCK) == (order % 251).astype(np.uint8)[:, None]).all(), "a byte is wrong"
        print(f"client: {BLOCKS} blocks of {BLOCK} bytes, all right, {cache.nbytes / seconds / 1e9:.2f} GB/s", flush=True)


if __name__ == "__main__":
    main(__doc__, server, client)
