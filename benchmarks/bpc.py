"""Bit-plane compression (Kim and others, ISCA 2016), which Buddy Compression has for entries of 128 bytes: how many
bits each entry takes.

An entry is 32 words. The first is coded alone; of the differences of neighbours, 31 numbers of 33 bits, the planes of
equal bits are coded: each as what differs from the plane above it.
"""

import numpy as np
import torch

ENTRY_BYTES, NUM_WORDS, NUM_PLANES = 128, 32, 33
SIZES = (0, 8, 16, 32, 64, 80, 96, 128)  # that entries take; 0 is for zeros alone (Buddy Compression, figure 3)
SECTOR_BYTES = 32
METADATA_BITS = 4  # an entry
ALL_ONES = (1 << (NUM_WORDS - 1)) - 1
# Bits of a plane's codes: a plane of zeros, a run of them, all ones, zeros before the difference, a one or two beside
# each other, and others as they are.
ZEROS, ZERO_RUN, ONES, CLEARED, FEW_ONES, OTHERS = 3, 7, 5, 5, 10, 32
FIRST_WORD = ((0, 3), (4, 7), (8, 11), (16, 19))  # (bits of a signed number, bits of its code); others take 33
CHUNK_ENTRIES = 1 << 12  # at once


def entries_of(data):
    """The entries of bytes, uint8 [n], as int32 [entries, 32]; zeros fill the last one."""
    return torch.nn.functional.pad(data, (0, -data.numel() % ENTRY_BYTES)).view(torch.int32).view(-1, NUM_WORDS)


def planes_of(entries):
    """int64 [entries, 33]: planes of the differences, the highest bit first; the i-th difference is the i-th bit."""
    differences = np.diff(entries.numpy().astype(np.int64), axis=1)
    bits = np.unpackbits(differences.view(np.uint8).reshape(-1, NUM_WORDS - 1, 8), axis=2, count=40, bitorder="little")
    planes = np.packbits(bits[:, :, NUM_PLANES - 1 :: -1].transpose(0, 2, 1), axis=2, bitorder="little")
    return torch.from_numpy(planes.view(np.uint32)[..., 0].astype(np.int64))


def first_word_bits(words):
    """Of the codes of the first words, int64 [entries]."""
    bits = torch.full_like(words, NUM_WORDS + 1)
    for width, code_bits in reversed(FIRST_WORD):
        low, high = (-(1 << width >> 1), (1 << width >> 1) - 1) if width else (0, 0)
        bits[(words >= low) & (words <= high)] = code_bits
    return bits


def plane_bits(plane, change):
    """Of the codes of planes that differ from the ones above them. change: what differs."""
    lowest = change & -change
    is_few = (change == lowest) | (change == 3 * lowest)
    bits = torch.where(is_few, FEW_ONES, OTHERS)
    return torch.where(plane == 0, CLEARED, torch.where(change == ALL_ONES, ONES, bits))


def coded_bits(entries):
    """Bits that each of the entries, int32 [entries, 32] on the CPU, takes: int64 [entries]."""
    found = [_coded_bits(part) for part in entries.split(CHUNK_ENTRIES)]
    return torch.cat(found) if found else entries.new_zeros(0, dtype=torch.int64)


def _coded_bits(entries):
    planes, bits = planes_of(entries), first_word_bits(entries[:, 0].long())
    above, run = torch.zeros_like(bits), torch.zeros_like(bits)  # run: planes of zeros up to here
    for plane in planes.unbind(1):
        change = plane ^ above
        is_zero, above = change == 0, plane
        first, second = is_zero & (run == 0), is_zero & (run == 1)
        bits += first * ZEROS + second * (ZERO_RUN - ZEROS) + torch.where(is_zero, 0, plane_bits(plane, change))
        run = torch.where(is_zero, run + 1, 0)
    return bits


def size_classes(entries):
    """The place in SIZES of each entry, int64 [entries]: the smallest size that it fits, or the largest."""
    needed = (coded_bits(entries) + 7) // 8
    classes = torch.bucketize(needed, torch.tensor(SIZES)).clamp(max=len(SIZES) - 1)
    return torch.where((entries == 0).all(1), 0, classes)


def stored_bytes(classes):
    """What entries of these classes take."""
    return int(torch.tensor(SIZES)[classes].sum())


def sector_bytes(classes):
    """The same in whole sectors."""
    sizes = torch.tensor(SIZES)[classes]
    return int((sizes + SECTOR_BYTES - 1).div(SECTOR_BYTES, rounding_mode="floor").sum()) * SECTOR_BYTES
