"""Lists of segments within blocks of `size` bytes: (own offset, remote offset, length), not overlapping."""

import numpy as np

SIZES = [1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 255, 256, 257, 4095, 4096, 4097, 65535, 65537, (1 << 20) - 1, (1 << 20) + 1]


def alignments(size, lengths):
    """Returns every pair of alignments to 16 bytes, for each of the lengths."""
    slot = 512
    rows = []
    places = np.random.default_rng(1).permutation(size // slot)
    for length in lengths:
        for own in range(16):
            for other in range(16):
                at = len(rows) * slot
                rows.append((at + own, int(places[len(rows)]) * slot + other, length))
    return rows


def scattered(size, count, seed):
    """Returns random lengths at random positions of both sides, in random orders, with gaps
    between them."""
    rng = np.random.default_rng(seed)
    slot = size // count
    lengths = rng.integers(1, slot + 1, count)
    places = [rng.permutation(count) * slot + rng.integers(0, slot - lengths + 1) for _ in "ab"]
    return [tuple(map(int, row)) for row in np.stack([*places, lengths], axis=1)]


def blocks(size, block):
    """Returns equal blocks that fill both sides, shuffled, like a KV cache."""
    order = np.random.default_rng(block).permutation(size // block)
    return [(index * block, int(other) * block, block) for index, other in enumerate(order)]


def mixture(size):
    """Returns few large segments, and many small ones between them."""
    rows, at = [], 3
    for index in range(40):
        length = 70_001 if index % 10 == 0 else 1 + index * 37
        rows.append((at, size - at - length, length))
        at += length + index % 5
    assert at < size
    return rows


def everything(size):
    """Returns names and lists, all for blocks of `size` bytes."""
    singles = [(f"{n} bytes", [(13, size - n - 5, n)]) for n in SIZES]
    return singles + [
        ("all alignments", alignments(size, (1, 5, 16, 33, 333))),
        ("scattered 1000", scattered(size, 1000, 7)),
        ("scattered 20", scattered(size, 20, 8)),
        ("blocks of 4 KiB", blocks(size, 4096)),
        ("blocks of 1000 B", blocks(size // 1000 * 1000, 1000)),
        ("a mixture", mixture(size)),
        ("the whole block", [(0, 0, size)]),
    ]
