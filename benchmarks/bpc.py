"""Bit-plane compression (Kim and others, ISCA 2016), which Buddy Compression applies to entries of 128 bytes: computes
how many bits each entry takes.

An entry has 32 words. The first word has a code of its own. The differences of neighbouring words are 31 numbers of 33
bits. Bits of equal weight form a plane, and each plane is encoded as its difference from the plane above it.
"""

import numpy as np
import torch

ENTRY_BYTES, NUM_WORDS, NUM_PLANES = 128, 32, 33
# The bytes that an entry can take. 0 is only for an entry of zeros (Buddy Compression, figure 3).
SIZES = (0, 8, 16, 32, 64, 80, 96, 128)
SECTOR_BYTES = 32
METADATA_BITS = 4  # Each entry needs this many bits for its size class.
ALL_ONES = (1 << (NUM_WORDS - 1)) - 1
# Bits of the code of a plane: a plane of zeros; a run of such planes; a difference of all ones; a plane that is zero
# while the plane above it is not; a difference with one 1 or two adjacent ones; any other plane, which is stored as it
# is.
ZEROS, ZERO_RUN, ONES, CLEARED, FEW_ONES, OTHERS = 3, 7, 5, 5, 10, 32
# Each entry has the bits of a signed number and the bits of its code. First words that fit no entry take 33 bits.
FIRST_WORD = ((0, 3), (4, 7), (8, 11), (16, 19))
CHUNK_ENTRIES = 1 << 12  # This many entries are encoded at once.


def entries_of(data):
    """Returns the entries of bytes, uint8 [n], as int32 [entries, 32]. The last entry is padded with zeros."""
    return torch.nn.functional.pad(data, (0, -data.numel() % ENTRY_BYTES)).view(torch.int32).view(-1, NUM_WORDS)


def planes_of(entries):
    """Returns the planes of the differences, int64 [entries, 33], the highest bit first. Bit i of a plane belongs to
    difference i."""
    differences = np.diff(entries.numpy().astype(np.int64), axis=1)
    bits = np.unpackbits(differences.view(np.uint8).reshape(-1, NUM_WORDS - 1, 8), axis=2, count=40, bitorder="little")
    planes = np.packbits(bits[:, :, NUM_PLANES - 1 :: -1].transpose(0, 2, 1), axis=2, bitorder="little")
    return torch.from_numpy(planes.view(np.uint32)[..., 0].astype(np.int64))


def first_word_bits(words):
    """Returns the bits of the codes of first words, int64 [entries]."""
    bits = torch.full_like(words, NUM_WORDS + 1)
    for width, code_bits in reversed(FIRST_WORD):
        low, high = (-(1 << width >> 1), (1 << width >> 1) - 1) if width else (0, 0)
        bits[(words >= low) & (words <= high)] = code_bits
    return bits


def plane_bits(plane, change):
    """Returns the bits of the codes of planes that differ from the ones above them. change: the difference."""
    lowest = change & -change
    is_few = (change == lowest) | (change == 3 * lowest)
    bits = torch.where(is_few, FEW_ONES, OTHERS)
    return torch.where(plane == 0, CLEARED, torch.where(change == ALL_ONES, ONES, bits))


def coded_bits(entries):
    """Returns the bits that each entry takes, int64 [entries]. entries: int32 [entries, 32] on the CPU."""
    found = [_coded_bits(part) for part in entries.split(CHUNK_ENTRIES)]
    return torch.cat(found) if found else entries.new_zeros(0, dtype=torch.int64)


def _coded_bits(entries):
    planes, bits = planes_of(entries), first_word_bits(entries[:, 0].long())
    # `run` counts the planes without a change up to here.
    above, run = torch.zeros_like(bits), torch.zeros_like(bits)
    for plane in planes.unbind(1):
        change = plane ^ above
        is_zero, above = change == 0, plane
        first, second = is_zero & (run == 0), is_zero & (run == 1)
        bits += first * ZEROS + second * (ZERO_RUN - ZEROS) + torch.where(is_zero, 0, plane_bits(plane, change))
        run = torch.where(is_zero, run + 1, 0)
    return bits


def size_classes(entries):
    """Returns the index in SIZES of each entry, int64 [entries]: the smallest size that the entry fits, or the largest
    one."""
    needed = (coded_bits(entries) + 7) // 8
    classes = torch.bucketize(needed, torch.tensor(SIZES)).clamp(max=len(SIZES) - 1)
    return torch.where((entries == 0).all(1), 0, classes)


def stored_bytes(classes):
    """Returns the bytes that entries of these classes take."""
    return int(torch.tensor(SIZES)[classes].sum())


def sector_bytes(classes):
    """Returns the bytes that entries of these classes take in whole sectors."""
    sizes = torch.tensor(SIZES)[classes]
    return int((sizes + SECTOR_BYTES - 1).div(SECTOR_BYTES, rounding_mode="floor").sum()) * SECTOR_BYTES
