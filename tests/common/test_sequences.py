"""Parts of sequences, and results that are worked on ahead of who asks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ibp._common.sequences import ahead, cut, in_threads, one_ahead


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


def test_threads_work_on_items_at_the_same_time():
    meeting, names = threading.Barrier(3), set()

    def work(item):
        names.add(threading.current_thread().name)
        meeting.wait(10)  # raises an exception unless three threads meet here
        return 2 * item

    assert list(in_threads(work, iter(range(9)), 3)) == [2 * item for item in range(9)]
    assert len(names) == 3 and threading.current_thread().name not in names


@pytest.mark.parametrize(("items", "num_threads"), [(range(4), 1), ([7], 3), ([], 3)])
def test_one_thread_is_the_callers(items, num_threads):
    found = in_threads(lambda item: (item, threading.current_thread()), items, num_threads)
    assert list(found) == [(item, threading.current_thread()) for item in items]


def test_threads_of_threads_work_alone():
    def work(item):
        return [threading.current_thread(), *in_threads(lambda _: threading.current_thread(), range(item), 4)]

    for item, found in zip(range(2, 8), in_threads(work, range(2, 8), 2)):
        assert len(found) == item + 1 and len(set(found)) == 1 and found[0] is not threading.current_thread()


def test_threads_begin_few_items_ahead():
    begun = []
    results = in_threads(lambda item: begun.append(item) or item, iter(range(100)), 2)
    assert next(results) == 0
    results.close()
    assert set(begun) <= set(range(5))


def test_threads_stop_after_an_exception():
    begun = []
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda item: begun.append(item) or 1 // (item - 3), iter(range(100)), 2))
    assert set(begun) <= set(range(8))
