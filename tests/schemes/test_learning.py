"""What all features learn codebooks by: a sample of rows, and when a kind of data is learned anew."""

import pytest
import torch

from ibp._layout import geometry


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
