"""Enough of torch for NIXL 1.0.0 to be imported: it asks whether things are tensors, and here none is.

Only on the path of the tests that run with that version; later versions do not import torch.
"""


class Tensor:
    pass
