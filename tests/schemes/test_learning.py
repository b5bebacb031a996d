"""What all features learn codebooks by: a sample of rows, and when a kind of data is learned anew."""

import pytest
import torch

from ibp._rows import geometry, masks
from ibp._rows.learning import Learner
from ibp._rows.masks import CHUNK_BYTES


@pytest.mark.parametrize("total", [1, 2, 200])
def test_a_sample_of_few_rows_is_all_of_them(total):
    assert geometry.sampled(total, 256).tolist() == [*range(total)]
    data = torch.arange(4 * total, dtype=torch.int32).view(torch.uint8)
    assert geometry.sample(data, 16, 256).data_ptr() == data.data_ptr()


def test_a_sample_has_a_row_of_each_part():
    """At places that differ from part to part, and by the seed."""
    rows = geometry.sampled(2560, 256)
    assert (rows // 10).tolist() == [*range(256)] and rows.remainder(10).unique().tolist() == [*range(10)]
    assert geometry.sampled(2560, 256, seed=1).tolist() != rows.tolist() == geometry.sampled(2560, 256).tolist()
    data = torch.arange(2560).repeat_interleave(2).view(torch.uint8)
    assert geometry.sample(data[:-3], 16, 256).view(torch.int64)[::2].tolist() == geometry.sampled(2559, 256).tolist()


def test_a_kind_is_learned_anew_ever_more_rarely():
    """Of data that do not compress, and of data that never stay as they are."""
    for found in (None, "a codebook"):
        learner, learned_for = Learner(), []
        for use in range(1, 100):
            if learner.is_due(use):
                learner.take(found, None if found is None else 0.5, use)
                learned_for.append(use)
            if found is not None:
                learner.note(90, 100)
                assert learner.has_drifted
        assert learned_for == [1, 2, 4, 8, 16, 32, 64] and learner.times == 6


def test_what_was_learned_serves_data_like_the_first():
    learner = Learner()
    assert learner.is_due(1)
    learner.take("a codebook")
    assert learner.fits(100, 100), "nothing is known yet of what data take"
    learner.note(50, 100)
    assert learner.share == 0.5 and not learner.has_drifted and not learner.is_due(1000)
    assert learner.fits(510, 1000) and not learner.fits(511, 1000)
    learner.note(52, 100)
    assert not learner.has_drifted
    learner.note(53, 100)
    assert learner.has_drifted and not learner.is_due(1) and learner.is_due(2)
    learner.note(50, 100)
    assert not learner.is_due(2)


def test_misfits_are_given_up():
    learner = Learner()
    for times in range(5):
        learner.has_drifted = True
        assert learner.is_hopeless == (times >= 4)
        learner.take("a codec")
        assert not learner.is_hopeless and learner.times == times


@pytest.mark.parametrize("row_bytes", [1, 7, 64, 255, 256, 4096, 4099])
@pytest.mark.parametrize("kinds", [1, 2, 300])
def test_masks_of_a_single_row_save_no_more_than_estimated(row_bytes, kinds):
    data = torch.randint(kinds, (row_bytes,), dtype=torch.int64).to(torch.uint8)  # of one kind: zeros
    found = masks.learn_masks(data, row_bytes, 1).expected_savings
    least = min(masks._single_row_bytes(data.numpy(), size) for size in CHUNK_BYTES)
    assert 1 - least / row_bytes >= found and min(masks.estimates(data, row_bytes, 1)) >= min(0.0, found)
    if kinds == 300 and row_bytes > 64:
        assert min(masks.estimates(data, row_bytes, 1)) < 0
