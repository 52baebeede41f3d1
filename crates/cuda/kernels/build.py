#!/usr/bin/env python3
"""Compiles each .cu here to PTX with NVRTC: build.py FOLDER

Needs the PyPI package nvidia-cuda-nvrtc-cu11, no toolkit and no GPU. scripts/test-kernels runs it.
"""

import ctypes
import pathlib
import sys

# CUDA 11.8 writes PTX that driver 520 and every later one compiles. compute_70 is the oldest
# supported GPU; the drivers compile its PTX for every later one.
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++14"]
LIBRARY = "nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2"


def library() -> ctypes.CDLL:
    for folder in sys.path:
        path = pathlib.Path(folder) / LIBRARY
        if path.exists():
            return ctypes.CDLL(str(path))
    sys.exit(f"error: no {LIBRARY} on sys.path: pip install nvidia-cuda-nvrtc-cu11==11.8.89")


def compile_ptx(source: pathlib.Path) -> bytes:
    nvrtc = library()
    program = ctypes.c_void_p()

    def call(name: str, *arguments) -> int:
        return getattr(nvrtc, "nvrtc" + name)(*arguments)

    def text(size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        call(size_of, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(get, program, buffer)
        return buffer.value

    status = call("CreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    if status != 0:
        sys.exit(f"error: NVRTC cannot start: status {status}")
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    status = call("CompileProgram", program, len(OPTIONS), options)
    log = text("GetProgramLogSize", "GetProgramLog").decode().strip()
    if log:
        print(log, file=sys.stderr)
    if status != 0:
        sys.exit(f"error: NVRTC cannot compile {source.name}: status {status}")
    return text("GetPTXSize", "GetPTX")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for source in pathlib.Path(__file__).resolve().parent.glob("*.cu"):
        (pathlib.Path(sys.argv[1]) / source.name).with_suffix(".ptx").write_bytes(compile_ptx(source))


if __name__ == "__main__":
    main()
