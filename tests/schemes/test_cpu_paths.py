"""The CPU coders with and without each set of vector instructions: the numpy references' bytes, the same tables."""

import numpy as np
import pytest
import torch

import ibp
import reference
import row_codecs
from golden.make_planes import (
    KINDS,
    LATER_FIELDS,
    adversarial_rows,
    coded_or_nothing,
    damaged,
    random_codebook,
    with_later_fields,
)
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import assert_same_bits, assert_same_table, bytes_of, embedding, make_tensor, pairwise, spiky_rows
from test_planes_rows import assert_coded_alike, assert_decoded_alike, codec_of

ALL = 0xFFFFFFFF
AVX2_BMI2, AVX512 = ibp._core.CPU_AVX2_BMI2, ibp._core.CPU_AVX512
FEATURE_SETS = {"plain": 0, "avx2": AVX2_BMI2, "avx512": AVX2_BMI2 | AVX512}


@pytest.fixture(params=FEATURE_SETS)
def features(request):
    wanted = FEATURE_SETS[request.param]
    in_use = ibp._core.set_cpu_features(wanted)
    if in_use == wanted:
        yield wanted
    ibp._core.set_cpu_features(ALL)
    if in_use != wanted:
        pytest.skip(f"this processor does not have what {request.param} needs")


def feature_sets_here():
    """Those that this processor has; the plain one first."""
    here = ibp._core.set_cpu_features(ALL)
    return [features for features in FEATURE_SETS.values() if not features & ~here]


def coded_with(features, call):
    ibp._core.set_cpu_features(features)
    try:
        return call()
    finally:
        ibp._core.set_cpu_features(ALL)


def test_features_are_those_set(features):
    assert ibp._core.cpu_features() == features
    assert ibp._core.set_cpu_features(0) == 0 and ibp._core.cpu_features() == 0
    assert coded_with(ALL, ibp._core.cpu_features) == ibp._core.set_cpu_features(ALL)
    assert ibp._core.set_cpu_features(AVX512) == 0


# ---- rows against the numpy references -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "element_bytes, digit_bits, kind", pairwise([1, 2, 4, 8], [(), (1, 4), (2, 2, 2, 3), (3, 3)], KINDS), ids=str
)
def test_rows_of_planes(element_bytes, digit_bits, kind, features):
    rng = np.random.default_rng([element_bytes, len(digit_bits), KINDS.index(kind)])
    for residual_bits in {0, 3, 7, 8, 8 * element_bytes - 8, 8 * element_bytes - 5, 8 * element_bytes}:
        if residual_bits > 8 * element_bytes:
            continue
        for columns in (1, 9, int(rng.integers(30, 90))):
            codebook = random_codebook(rng, element_bytes, columns, residual_bits % 2, residual_bits, digit_bits, kind)
            for changed in (codebook, with_later_fields(rng, codebook), with_later_fields(rng, codebook, LATER_FIELDS)):
                rows = adversarial_rows(rng, 3, changed)
                assert_coded_alike(changed, rows)
                codec, coded = codec_of(changed), coded_or_nothing(changed, rows[1].tobytes())
                for bad in damaged(rng, coded or rows[1].tobytes(), 3):
                    assert_decoded_alike(changed, codec, bad)


@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("row_bytes", [1, 7, 8, 33, 250])
def test_rows_of_masks(row_bytes, chunk_bytes, features):
    rng = np.random.default_rng([row_bytes, chunk_bytes])
    for flag_all in (False, True):
        mask = rng.integers(0, 256, row_bytes, np.uint8) & rng.integers(0, 256, row_bytes, np.uint8)
        bitval = rng.integers(0, 256, row_bytes, np.uint8) & mask
        codebook, codec = (
            reference.make_codebook(mask, bitval, chunk_bytes, flag_all),
            row_codecs.RowCodec(mask, bitval, chunk_bytes, flag_all),
        )
        for _ in range(8):
            row = rng.integers(0, 256, row_bytes, np.uint8)
            row = np.where(rng.random(row_bytes) < 0.9, row & ~mask | bitval, row).astype(np.uint8).tobytes()
            coded = reference.encode_row(codebook, row)
            assert codec.encode(row) == coded and codec.coded_bytes(row) == len(coded) and codec.decode(coded) == row
            for bad in (coded[:-1], coded + b"\0"):
                with pytest.raises(ValueError, match="contradicts"):
                    codec.decode(bad)


# ---- tables --------------------------------------------------------------------------------------------------------

TENSORS = {
    "bfloat16": lambda: embedding(300, 77, torch.bfloat16),
    "float16": lambda: embedding(300, 1024, torch.float16),
    "float32": lambda: embedding(200, 100),
    "float64": lambda: embedding(100, 33, torch.float64),
    "spiky": lambda: spiky_rows(200, 300),
    "spiky bfloat16": lambda: spiky_rows(200, 300).bfloat16(),
    "sparse int8": lambda: make_tensor((500, 61), torch.int8),
    "narrow int64": lambda: make_tensor((200, 19), torch.int64, "narrow"),
}


@pytest.mark.parametrize("scheme", ["ibp", "planes", "auto"])
@pytest.mark.parametrize("name", TENSORS)
def test_tables_are_the_same(name, scheme):
    x = TENSORS[name]()
    codebook = ibp.codecs.analyze(x, scheme=scheme)

    def compressed():
        return ibp.compress(x, codebook=codebook, device="cpu", memory="host")

    plain = coded_with(0, compressed)
    ids = torch.tensor([0, len(x) - 1, 5, 5])
    for features in feature_sets_here():
        assert_same_table(plain, coded_with(features, compressed))
        assert_same_bits(coded_with(features, lambda: ibp.decompress(plain)), x)
        assert_same_bits(coded_with(features, lambda: ibp.index_select(plain, ids)), x[ids])


@pytest.mark.slow
@pytest.mark.parametrize("bad_rows", [(1234,), (1999, 777), (0,)], ids=str)
@pytest.mark.parametrize("scheme", ["ibp", "planes"])
def test_encode_rows_names_the_bad_row(scheme, bad_rows, features, set_threads):
    """Also where several threads have rows, and in the middle of a thread's."""
    set_threads(3)
    x = spiky_rows(2000, 60)
    table = ibp.compress(x, scheme=scheme, slot_bytes=32, device="cpu", memory="host")
    slots, overflow, *rest = values_of(table, torch.device("cpu"))
    data, fault = bytes_of(x).clone(), torch.zeros(4, dtype=torch.int64)
    for row in bad_rows:
        data[240 * row : 240 * (row + 1)] = torch.randint(0, 256, (240,), dtype=torch.uint8)
    assert all(int(table.lengths[row]) != 0 for row in bad_rows)
    OPS.encode_rows(torch.zeros_like(slots), torch.zeros_like(overflow), *rest, data, fault)
    assert fault.tolist()[:3] == [3, min(bad_rows), min(bad_rows)]


@pytest.mark.parametrize("slot_bytes", [0, 32, 96, 240])
def test_zeros_follow_rows_to_the_end_of_their_room(slot_bytes, features):
    """Whatever memory held before: equal tables have equal tensors."""
    x = torch.cat([spiky_rows(500, 60), torch.zeros(3, 60)])
    x = x.view(-1)[:-7] if slot_bytes != 240 else x
    layout = {"slot_bytes": slot_bytes} if slot_bytes else {"layout": "packed"}
    table = ibp.compress(x, scheme="planes", row_bytes=240, device="cpu", memory="host", **layout)
    slots, overflow, *rest = values_of(table, torch.device("cpu"))
    fault = torch.zeros(4, dtype=torch.int64)
    for byte in (0, 0xA5):
        written = torch.full_like(slots, byte), torch.full_like(overflow, byte)
        OPS.encode_rows(*written, *rest, bytes_of(x), fault)
        assert torch.equal(written[0], slots) and torch.equal(written[1], overflow) and fault.tolist()[0] == 0
