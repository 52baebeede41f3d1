"""Replays of the applications that use NIXL: the sequence of calls that each one's code makes.

| file | application | what moves bytes |
|---|---|---|
| test_vllm.py | vLLM's NixlConnector, pull and push | prepared lists, one region a layer |
| test_sglang.py | SGLang's disaggregation | prepared lists by page and head group, strided lists |
| test_kvbm.py | Dynamo's block manager | NIXL's C API, as its Rust bindings call it |
| test_lmcache.py | LMCache's NixlChannel | prepared lists, the tensor-parallel rank as device |
| test_tensorrt_llm.py | TensorRT-LLM's transfer agent | NIXL's C++ API, metadata by its listener |
| test_ray.py | Ray's direct transport | READs, memory that comes and goes |
| test_verl.py | verl's checkpoint engine | READs of buckets in a chain of processes |
| test_nixl_connect.py | Dynamo's nixl_connect | READ and WRITE, one registration an operation |

Each runs with DRAM, and with VRAM where there is a GPU; compares every byte of both sides; and has
a peer that dies during a transfer: the survivor gets an error, frees what it had for that peer, and
works with the next one.
"""
