"""Parts of sequences, and results that are worked on ahead of who asks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ibp._common.sequences import ahead, cut, one_ahead


@pytest.mark.parametrize(
    ("sizes", "most", "parts"),
    [
        ([], 5, [[]]),
        ([9], 5, [[9]]),
        ([2, 3, 1], 5, [[2, 3], [1]]),
        ([9, 0, 1, 4], 5, [[9], [0, 1, 4]]),
        ([9, 9, 9], None, [[9, 9, 9]]),
    ],
)
def test_cut(sizes, most, parts):
    assert cut(sizes, lambda size: size, most) == parts


def test_one_item_is_begun_ahead():
    begun = []
    items = one_ahead(begun.append(number) or number for number in range(4))
    assert next(items) == 0 and begun == [0, 1]
    assert list(items) == [1, 2, 3]
    assert list(one_ahead([])) == []


def test_results_come_in_order_and_no_more_are_begun_than_asked_for():
    begun, may_end = [], threading.Event()

    def work(item):
        begun.append(item)
        may_end.wait(10)
        return 2 * item

    with ThreadPoolExecutor(4) as threads:
        results = ahead(threads, work, range(10), 2)
        may_end.set()
        assert [next(results), next(results)] == [0, 2]
        results.close()
    assert set(begun) <= {0, 1, 2, 3}
    with ThreadPoolExecutor(4) as threads:
        assert list(ahead(threads, work, range(10), 2)) == [2 * item for item in range(10)]


def test_an_exception_comes_in_its_place():
    with ThreadPoolExecutor(2) as threads:
        results = ahead(threads, lambda item: 1 // item, [1, 0, 1], 3)
        assert next(results) == 1
        with pytest.raises(ZeroDivisionError):
            next(results)
