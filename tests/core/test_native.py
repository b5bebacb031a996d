"""What the tests share: few combinations of values that hold every pair, and programs that are compiled once."""

import itertools

import native
from helpers import pairwise


def test_pairwise_holds_every_pair_in_few_rows():
    columns = [list(range(9)), ["a", "b", "c", "d"], [False, True], [1.0, 2.0, 3.0]]
    rows = pairwise(*columns)
    assert rows == pairwise(*columns) and 9 * 4 <= len(rows) < 60
    for i, j in itertools.combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(columns[i], columns[j]))


def test_objects_are_made_again_when_a_header_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "KEPT", tmp_path / "kept")
    source, header = tmp_path / "main.c", tmp_path / "number.h"
    source.write_text('#include "number.h"\nint main(void) { return NUMBER; }\n')
    calls = []
    monkeypatch.setattr(native, "run", lambda *words, run=native.run: calls.append(words) or run(*words))

    def status():
        before = len(calls)
        program = native.linked(native.c_compiler(), native.core_objects([], [source]))
        return native.run([program])[0], len(calls) - before - 1

    native.version_of(native.c_compiler()[0])
    header.write_text("#define NUMBER 3\n")
    assert status() == (3, 2)
    assert status() == (3, 0)
    header.write_text("#define NUMBER 4\n")
    assert status() == (4, 2)
