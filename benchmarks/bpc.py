"""Bit-plane compression (Kim and others, ISCA 2016), which Buddy Compression applies to entries of 128 bytes.

An entry has 32 words. The first word has a code of its own. The differences of neighbouring words are 31 numbers of 33
bits. Bits of equal weight form a plane, and each plane is coded as its difference from the plane above it.

`encode` codes entries to the eight sizes that Buddy Compression has, and `decode` brings them back. An entry that fits
no smaller size is stored as it is. The codes of other entries follow each other from the highest bit of the first byte
on, and the rest of their size is zero.
"""

import numpy as np
import torch

ENTRY_BYTES, NUM_WORDS, NUM_PLANES = 128, 32, 33
# The bytes that an entry can take. 0 is only for an entry of zeros (Buddy Compression, figure 3).
SIZES = (0, 8, 16, 32, 64, 80, 96, 128)
ZERO_ENTRY, STORED_ENTRY = 0, len(SIZES) - 1  # The classes of entries that have no codes.
SECTOR_BYTES = 32
METADATA_BITS = 4  # Each entry needs this many bits for its size class.
DIFFERENCES = NUM_WORDS - 1
ALL_ONES = (1 << DIFFERENCES) - 1
# Codes of a plane, as (prefix, bits of the prefix, bits that follow it): a plane that equals the one above it; a run of
# 2 to 33 of these, less 2; a difference of all ones; a plane that is zero while the one above it is not; a difference
# with two adjacent ones, or with one, and the position of the lower one; any other plane, as it is.
ZEROS, ZERO_RUN, ONES, CLEARED = (0b001, 3, 0), (0b01, 2, 5), (0b00000, 5, 0), (0b00001, 5, 0)
TWO_ONES, ONE, OTHERS = (0b00010, 5, 5), (0b00011, 5, 5), (0b1, 1, DIFFERENCES)
# Codes of the first word, as (prefix, bits of the prefix, bits of a signed number that follows it).
FIRST_WORD = ((0b000, 3, 0), (0b001, 3, 4), (0b010, 3, 8), (0b011, 3, 16), (0b1, 1, 32))
CHUNK_ENTRIES = 1 << 12  # This many entries are coded at once.
# Room for the longest code of an entry, in words of 64 bits, and for reading one more word behind it.
CODE_WORDS = -(-(33 + NUM_PLANES * 32) // 64) + 2


def entries_of(data):
    """Returns the entries of bytes, uint8 [n], as int32 [entries, 32]. The last entry is padded with zeros."""
    return torch.nn.functional.pad(data, (0, -data.numel() % ENTRY_BYTES)).view(torch.int32).view(-1, NUM_WORDS)


def planes_of(words):
    """Returns the planes of the differences of words int32 [entries, 32]: uint64 [entries, 33], the highest bit first.
    Bit i of a plane belongs to difference i."""
    differences = np.diff(words.astype(np.int64), axis=1)
    bits = np.unpackbits(differences.view(np.uint8).reshape(-1, DIFFERENCES, 8), axis=2, count=40, bitorder="little")
    planes = np.packbits(bits[:, :, NUM_PLANES - 1 :: -1].transpose(0, 2, 1), axis=2, bitorder="little")
    return planes.view(np.uint32)[..., 0].astype(np.uint64)


def words_of(first, planes):
    """Returns the words int32 [entries, 32] that have these first words and planes of differences."""
    bits = np.unpackbits(planes.astype(np.uint32).view(np.uint8).reshape(-1, NUM_PLANES, 4), axis=2, bitorder="little")
    bits = bits[:, ::-1, :DIFFERENCES].transpose(0, 2, 1)
    bits = np.concatenate([bits, np.repeat(bits[:, :, -1:], 64 - NUM_PLANES, axis=2)], axis=2)  # the sign's bit
    differences = np.packbits(bits, axis=2, bitorder="little").view(np.int64)[..., 0]
    return np.cumsum(np.concatenate([first[:, None], differences], axis=1), axis=1).astype(np.int32)


def fitted(number, num_bits):
    """Returns whether signed numbers fit num_bits; without bits only 0 does."""
    half = 1 << num_bits >> 1
    return (number >= -half) & (number < max(half, 1))


def codes_of(words):
    """Returns the codes of words int32 [entries, 32] as (values, their numbers of bits), both uint64 [34, entries]: the
    first word's, then those of the planes. A run of planes has its code at the first one, and none at the others."""
    first = words[:, 0].astype(np.int64)
    values, lengths = np.zeros((2, 1 + NUM_PLANES, len(words)), np.uint64)

    def put(k, is_coded, code, number):
        prefix, prefix_bits, num_bits = code
        low = np.asarray(number).astype(np.uint64) & np.uint64((1 << num_bits) - 1)
        values[k] = np.where(is_coded, np.uint64(prefix << num_bits) | low, values[k])
        lengths[k] = np.where(is_coded, np.uint64(prefix_bits + num_bits), lengths[k])

    for code in reversed(FIRST_WORD):
        put(0, fitted(first, code[2]), code, first)
    planes = planes_of(words)
    changes = planes ^ np.concatenate([np.zeros_like(planes[:, :1]), planes[:, :-1]], axis=1)
    run = np.zeros(len(words), np.int64)  # the planes from here on that equal the one above them
    for k in reversed(range(NUM_PLANES)):
        plane, change = planes[:, k], changes[:, k]
        is_zero = change == 0
        run = np.where(is_zero, run + 1, 0)
        begins = is_zero if k == 0 else is_zero & (changes[:, k - 1] != 0)
        lowest = change & (~change + np.uint64(1))
        position = np.log2(np.maximum(lowest, 1).astype(np.float64))
        put(k + 1, ~is_zero, OTHERS, plane)
        put(k + 1, ~is_zero & (change == lowest), ONE, position)
        put(k + 1, ~is_zero & (change == np.uint64(3) * lowest), TWO_ONES, position)
        put(k + 1, change == ALL_ONES, ONES, 0)
        put(k + 1, ~is_zero & (plane == 0), CLEARED, 0)
        put(k + 1, begins & (run == 1), ZEROS, 0)
        put(k + 1, begins & (run > 1), ZERO_RUN, np.maximum(run - 2, 0))
    return values, lengths


def packed(values, lengths):
    """Returns the codes of each entry one after the other, from the highest bit of the first byte on: uint8 [entries,
    bytes]."""
    num_entries = values.shape[1]
    words, each = np.zeros((num_entries, CODE_WORDS), np.uint64), np.arange(num_entries)
    position = np.zeros(num_entries, np.uint64)
    for value, length in zip(values, lengths):
        number, at = (position >> np.uint64(6)).astype(np.int64), position & np.uint64(63)
        # The code begins at the highest bit of `high`. A shift by 64 bits is made as two, as it is not defined.
        high = np.where(length == 0, 0, value << (np.uint64(64) - np.maximum(length, 1)))
        words[each, number] |= high >> at
        words[each, number + 1] |= high << (np.uint64(63) - at) << np.uint64(1)
        position += length
    return words.byteswap().view(np.uint8)


def encode(entries):
    """Codes entries. Returns (the index in SIZES of each entry, uint8 [entries]; the coded entries one after the other,
    uint8 [bytes]). entries: int32 [entries, 32] on the CPU."""
    found = [_encode(part.numpy()) for part in entries.split(CHUNK_ENTRIES)]
    classes, data = zip(*found) if found else ([], [])
    none = np.zeros(0, np.uint8)
    return np.concatenate([none, *classes]), np.concatenate([none, *data])


def _encode(words):
    values, lengths = codes_of(words)
    needed = (lengths.sum(axis=0) + np.uint64(7)) // np.uint64(8)
    classes = np.minimum(np.searchsorted(SIZES, needed), STORED_ENTRY).astype(np.uint8)
    classes[(words == 0).all(axis=1)] = ZERO_ENTRY
    room = np.zeros((len(words), ENTRY_BYTES), np.uint8)
    is_coded = (classes != ZERO_ENTRY) & (classes != STORED_ENTRY)
    room[is_coded] = packed(values[:, is_coded], lengths[:, is_coded])[:, :ENTRY_BYTES]
    room[classes == STORED_ENTRY] = words[classes == STORED_ENTRY].view(np.uint8)
    return classes, room[_is_used(classes)]


def _is_used(classes):
    """Returns which of the bytes of entries with these classes are stored, bool [entries, 128]."""
    return np.arange(ENTRY_BYTES) < np.array(SIZES)[classes][:, None]


def decode(classes, data):
    """Returns the entries that `encode` was given, int32 [entries, 32]."""
    ends, found = np.cumsum(np.array(SIZES)[classes]), [np.zeros((0, NUM_WORDS), np.int32)]
    for first in range(0, len(classes), CHUNK_ENTRIES):
        part = classes[first : first + CHUNK_ENTRIES]
        start, end = ends[first - 1] if first else 0, ends[first + len(part) - 1]
        found.append(_decode(part, data[start:end]))
    return torch.from_numpy(np.concatenate(found))


def _decode(classes, data):
    room = np.zeros((len(classes), 8 * CODE_WORDS), np.uint8)
    room[:, :ENTRY_BYTES][_is_used(classes)] = data
    words = np.zeros((len(classes), NUM_WORDS), np.int32)
    words[classes == STORED_ENTRY] = room[classes == STORED_ENTRY, :ENTRY_BYTES].view(np.int32)
    is_coded = (classes != ZERO_ENTRY) & (classes != STORED_ENTRY)
    if is_coded.any():
        words[is_coded] = words_of(*_read(room[is_coded].view(np.uint64).byteswap()))
    return words


def _read(code):
    """Returns the first words, int64 [entries], and the planes, uint64 [entries, 33], of codes uint64 [entries,
    CODE_WORDS]."""
    num_entries, each = len(code), np.arange(len(code))
    position, first = np.zeros(num_entries, np.int64), np.zeros(num_entries, np.int64)

    def coming():
        """Returns the next 64 bits of each entry."""
        number, at = position >> 6, (position & 63).astype(np.uint64)
        return code[each, number] << at | code[each, number + 1] >> (np.uint64(63) - at) >> np.uint64(1)

    def begins(bits, code):
        return bits >> np.uint64(64 - code[1]) == code[0]

    def behind(bits, code):
        """Returns the number behind a prefix."""
        return (bits << np.uint64(code[1]) >> np.uint64(63 - code[2]) >> np.uint64(1)).astype(np.int64)

    bits = coming()
    for kind in FIRST_WORD:
        number, is_it = behind(bits, kind), begins(bits, kind)
        first[is_it] = (number - ((number >> max(kind[2] - 1, 0) & 1) << kind[2]))[is_it]
        position[is_it] += kind[1] + kind[2]
    planes, above = np.zeros((num_entries, NUM_PLANES), np.uint64), np.zeros(num_entries, np.uint64)
    run = np.zeros(num_entries, np.int64)  # the planes from here on that a run has
    for k in range(NUM_PLANES):
        bits, plane, is_new = coming(), above.copy(), run == 0
        kinds = {kind: is_new & begins(bits, kind) for kind in (ZEROS, ZERO_RUN, ONES, CLEARED, TWO_ONES, ONE, OTHERS)}
        for kind, is_it in kinds.items():
            number = behind(bits, kind)[is_it]
            if kind == ZERO_RUN:
                run[is_it] = number + 2
            elif kind == ZEROS:
                run[is_it] = 1
            else:
                change = {ONES: ALL_ONES, ONE: 1 << number, TWO_ONES: 3 << number}.get(kind, 0)
                plane[is_it] = {CLEARED: 0, OTHERS: number}.get(kind, above[is_it] ^ np.asarray(change, np.uint64))
            position[is_it] += kind[1] + kind[2]
        run = np.maximum(run - 1, 0)
        planes[:, k] = above = plane
    return first, planes


def sector_bytes(classes):
    """Returns the bytes that entries of these classes take in whole sectors."""
    sizes = np.array(SIZES)[classes]
    return int((-(-sizes // SECTOR_BYTES) * SECTOR_BYTES).sum())
