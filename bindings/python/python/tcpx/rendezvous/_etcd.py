"""A store in etcd (3.4 or later), over its HTTP gateway."""

from __future__ import annotations

import base64
import http.client
import json
import math
import ssl
import time
from typing import Any
from urllib.parse import quote

from tcpx.rendezvous._errors import RendezvousError
from tcpx.rendezvous._store import MEMBERS, PolledStore

# Number of values fetched at once.
PAGE = 64

# Time limit of one request before the next member of the cluster is tried, in seconds.
REQUEST_TIMEOUT = 5.0


class EtcdStore(PolledStore):
    """Keeps each value under the key `PREFIX/RUN/FOLDER/RANK`.

    Keys have a lease, so that data of a killed run expires.
    """

    def __init__(self, endpoints: list[tuple[str, int]], prefix: str, run: str, timeout: float, *, tls: bool) -> None:
        self.endpoints = endpoints
        self.tls = tls
        self.timeout = timeout
        self.prefix = f"{prefix}/{quote(run, safe='')}/"
        self.connection: http.client.HTTPConnection | None = None

    def claim(self, rank: int, value: bytes) -> bytes | None:
        key = self._key(MEMBERS, rank)
        request = {
            "compare": [{"target": "CREATE", "key": key, "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": key, "value": _encode(value), "lease": self._lease()}}],
        }
        if self._call("kv/txn", request).get("succeeded"):
            return None
        there = self.values(MEMBERS).get(rank, b"")
        # A lost reply makes the client send the request twice.
        return None if there == value else there

    def put(self, folder: str, rank: int, value: bytes) -> None:
        self._call("kv/put", {"key": self._key(folder, rank), "value": _encode(value), "lease": self._lease()})

    def ranks(self, folder: str) -> set[int]:
        return set(self._range(folder, keys_only=True))

    def values(self, folder: str) -> dict[int, bytes]:
        return self._range(folder, keys_only=False)

    def clear(self) -> None:
        self._call("kv/deleterange", {"key": _encode(self.prefix.encode()), "range_end": _after(self.prefix)})

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _lease(self) -> str:
        """Creates a lease. Values under it are read within the time limit, or never."""
        return str(self._call("lease/grant", {"TTL": str(math.ceil(self.timeout) + 60)})["ID"])

    def _key(self, folder: str, rank: int) -> str:
        return _encode(f"{self.prefix}{folder}/{rank}".encode())

    def _range(self, folder: str, *, keys_only: bool) -> dict[int, bytes]:
        start = f"{self.prefix}{folder}/"
        request = {"key": _encode(start.encode()), "range_end": _after(start), "keys_only": keys_only}
        if not keys_only:
            request["limit"] = str(PAGE)
        found: dict[int, bytes] = {}
        while True:
            answer = self._call("kv/range", request)
            pairs = answer.get("kvs", [])
            for pair in pairs:
                name = base64.b64decode(pair["key"]).decode().removeprefix(start)
                found[int(name)] = base64.b64decode(pair.get("value", ""))
            if not answer.get("more"):
                return found
            request["key"] = _encode(base64.b64decode(pairs[-1]["key"]) + b"\0")

    def _call(self, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """Tries one member of the cluster after the other until one answers or the time is up."""
        deadline = time.monotonic() + self.timeout
        body = json.dumps(request)
        while True:
            try:
                connection = self.connection or self._connect()
                connection.request("POST", f"/v3/{method}", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                status, text = response.status, response.read()
                if status == 200:
                    answer: dict[str, Any] = json.loads(text)
                    return answer
                why = f"HTTP status {status}: {_reason(text)}"
                if status < 500:
                    raise RendezvousError(f"etcd at {self._name()} refuses: {why}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"etcd at {self._name()} did not answer within {self.timeout:g} s ({why}): is the"
                    " address right, is etcd 3.4 or later running there, and does a firewall allow it?"
                )
            self.close()
            self.endpoints.append(self.endpoints.pop(0))
            time.sleep(0.1)

    def _connect(self) -> http.client.HTTPConnection:
        # Never through a proxy: the etcd of a cluster is inside it.
        host, port = self.endpoints[0]
        if self.tls:
            context = ssl.create_default_context()
            self.connection = http.client.HTTPSConnection(host, port, timeout=REQUEST_TIMEOUT, context=context)
        else:
            self.connection = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT)
        return self.connection

    def _name(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in sorted(self.endpoints))


def _encode(text: bytes) -> str:
    return base64.b64encode(text).decode()


def _after(prefix: str) -> str:
    """Returns the first key after all that begin with a prefix, which ends in a slash."""
    return _encode(prefix[:-1].encode() + b"0")


def _reason(text: bytes) -> str:
    try:
        answer = json.loads(text)
        return str(answer.get("message") or answer.get("error") or answer)
    except ValueError:
        return text[:200].decode(errors="replace").strip()
