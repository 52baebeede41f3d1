"""Enough of torch for NIXL 1.0 to 1.3 to be imported.

They ask whether things are tensors, and here none is; from 1.1 on they also ask for the version of CUDA. Only on
the path of the tests that run with those versions: later ones do not import torch.
"""


class Tensor:
    pass
