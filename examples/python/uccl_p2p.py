"""A program written for uccl.p2p, unchanged: the client reads from and writes to memory of the server.

    TCPX_AS_UCCL=1 python uccl_p2p.py server 127.0.0.1 18515
    TCPX_AS_UCCL=1 python uccl_p2p.py client 127.0.0.1 18515
"""

import sys

import numpy as np
from bootstrap import Bootstrap, main

try:
    from uccl import p2p
except ImportError:
    sys.exit(f"{__doc__}\nerror: there is no package uccl: set TCPX_AS_UCCL=1, as above, and tcpx stands in for it")

SIZE = 1 << 20


def server(host, port):
    endpoint = p2p.Endpoint(0)
    memory = np.full(SIZE, 7, dtype=np.uint8)
    with Bootstrap.serve(host, port) as bootstrap:
        bootstrap.send(endpoint.get_metadata())
        ok, ip, _gpu, conn_id = endpoint.accept()
        assert ok, "accept failed"
        ok, mr_id = endpoint.reg(memory.ctypes.data, memory.nbytes)
        ok, blob = endpoint.advertise(mr_id, memory.ctypes.data, memory.nbytes)
        bootstrap.send(blob)
        bootstrap.receive()
        assert (memory == 9).all(), "the client's bytes are not here"
        print(f"server: {ip} wrote {SIZE} bytes on connection {conn_id}", flush=True)
        endpoint.dereg(mr_id)


def client(host, port):
    endpoint = p2p.Endpoint(0)
    memory = np.zeros(SIZE, dtype=np.uint8)
    ok, mr_id = endpoint.reg(memory.ctypes.data, memory.nbytes)
    with Bootstrap.connect(host, port) as bootstrap:
        ip, remote_port, gpu = p2p.Endpoint.parse_metadata(bootstrap.receive())
        ok, conn_id = endpoint.connect(ip, gpu, remote_port=remote_port)
        assert ok, "connect failed"
        blob = bootstrap.receive()
        assert endpoint.read(conn_id, mr_id, memory.ctypes.data, SIZE, blob)
        assert (memory == 7).all(), "the server's bytes are not here"
        memory[:] = 9
        ok, transfer_id = endpoint.write_async(conn_id, mr_id, memory.ctypes.data, SIZE, blob)
        done = False
        while not done:
            ok, done = endpoint.poll_async(transfer_id)
            assert ok, "the transfer failed"
        bootstrap.send(b"written")
        print("client: read and written", flush=True)


if __name__ == "__main__":
    main(__doc__, server, client)
