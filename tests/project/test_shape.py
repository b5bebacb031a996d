"""The shape that tools/shape.py counts: floors, circles, private names and the root."""

import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from shape import FLOORS, Package  # noqa: E402

MOST_PRIVATE_READS = 109  # about half are methods of tables that have an underscore since users need not see them
MOST_ROOT_NAMES = 48
MOST_SHARED_CLASS_NAMES = 0


@pytest.fixture(scope="module")
def package():
    return Package()


def test_floors_are_all_folders_and_modules(package):
    names = {name.split(".")[1] for name in package.trees if "." in name} - {"__main__"}
    assert names == set(FLOORS)


def test_imports_go_up(package):
    assert package.upward_imports == []


def test_no_circles(package):
    assert package.circles == []


def test_private_reads(package):
    assert sum(package.private_reads.values()) <= MOST_PRIVATE_READS, package.private_reads


def test_class_names(package):
    assert len(package.class_names) <= MOST_SHARED_CLASS_NAMES, package.class_names


def test_root_names(package):
    assert len(package.root_names) <= MOST_ROOT_NAMES


@pytest.mark.parametrize(
    "sources, upward, circles",
    [
        ({"cache/a.py": "from .._common import b", "_common/b.py": ""}, 0, 0),
        ({"cache/a.py": "", "_common/b.py": "from ..cache.a import x"}, 1, 0),
        ({"cache/a.py": "", "_common/b.py": "def f():\n    from ..cache import a"}, 1, 0),
        ({"cache/a.py": "", "_common/b.py": "import ibp.cache.a"}, 1, 0),
        (
            {
                "cache/a.py": "",
                "_common/b.py": """
                    from typing import TYPE_CHECKING
                    if TYPE_CHECKING:
                        from ..cache.a import x
                """,
            },
            0,
            0,
        ),
        ({"cache/a.py": "from . import b", "cache/b.py": "from .c import y", "cache/c.py": "from .a import z"}, 0, 1),
    ],
)
def test_counts(tmp_path, sources, upward, circles):
    for name in ("ibp", "ibp/cache", "ibp/_common"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    for path, text in sources.items():
        (tmp_path / "ibp" / path).write_text(textwrap.dedent(text))
    found = Package(tmp_path)
    assert (len(found.upward_imports), len(found.circles)) == (upward, circles)


def test_private_reads_are_of_other_files(tmp_path):
    (tmp_path / "ibp").mkdir()
    (tmp_path / "ibp" / "__init__.py").write_text("")
    (tmp_path / "ibp" / "a.py").write_text("class A:\n    def __init__(self):\n        self._x = 1\n")
    (tmp_path / "ibp" / "b.py").write_text("def f(a):\n    return a._x + a._of_torch\n")
    (tmp_path / "ibp" / "c.py").write_text("def f(a):\n    a._x = 2\n    return a._x\n")
    assert Package(tmp_path).private_reads == {"ibp.b": 1}
