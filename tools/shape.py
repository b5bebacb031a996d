"""Counts measures of the library's structure in its sources.

    python tools/shape.py            # the counts, one a line
    python tools/shape.py --list     # with the names behind them

Counts imports against the order of the floors, files that import each other in circles, reads of another file's private
attributes, names at the root, class names that several classes share, words of the documentation, and lines of `ibp/`
and `csrc/`. Imports inside functions count; imports only for type checkers do not.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders and modules of ibp/. Each one imports only from itself and from those listed before it.
FLOORS = (
    "_common",
    "_machine",
    "_rows",
    "_fetch",
    "_tables",
    "cache",
    "spill",
    "codecs",
    "kv",
    "calibration",
    "deltas",
    "_files",
    "checkpoints",
    "nn",
    "optim",
    "_offload",
    "_activations",
    "distributed",
    "adapters",
    "_cli",
    "integrations",
)
COMPILED = ("ibp._core",)  # A compiled module imports nothing.
C_SOURCES = (".c", ".h", ".cu", ".cuh", ".cpp")


class Package:
    """The Python files of `ibp/`, by module name."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.trees: dict[str, ast.Module] = {}
        self.packages: set[str] = set()
        for path in sorted((root / "ibp").rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            if path.stem == "__init__":
                name = name.removesuffix(".__init__")
                self.packages.add(name)
            self.trees[name] = ast.parse(path.read_text(encoding="utf-8"))

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Returns, for each module, the modules of the package that it imports when it runs."""
        return {name: set(self._imported(name)) - {name} for name in self.trees}

    def _imported(self, name: str) -> Iterator[str]:
        for node in nodes_that_run(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.trees)
            elif isinstance(node, ast.ImportFrom):
                module = self._named(name, node)
                for alias in node.names:
                    for target in (f"{module}.{alias.name}", module):
                        if target in self.trees or target in COMPILED:
                            yield from () if target in COMPILED else (target,)
                            break

    def _named(self, name: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = name.split(".") if name in self.packages else name.split(".")[:-1]
        return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])

    @cached_property
    def upward_imports(self) -> list[str]:
        """Returns imports from a folder that stands later in `FLOORS`, as "module: module"."""
        floors = {name: number for number, name in enumerate(FLOORS)}
        lowest = floors["_cli"]
        found = []
        for name, targets in self.imports.items():
            if name in ("ibp", "ibp.__main__"):
                continue
            own = floors[name.split(".")[1]]
            for target in sorted(targets):
                floor = lowest - 1 if target == "ibp" else floors[target.split(".")[1]]
                if floor > own or (target == "ibp" and own < lowest):
                    found.append(f"{name}: {target}")
        return found

    @cached_property
    def circles(self) -> list[list[str]]:
        """Returns groups of modules that import each other, directly or through others. The root is left out because it
        imports all."""
        graph = {name: targets - {"ibp"} for name, targets in self.imports.items() if name != "ibp"}
        return [sorted(group) for group in strongly_connected(graph) if len(group) > 1]

    @cached_property
    def private_reads(self) -> Counter[str]:
        """Counts, for each module, reads of private attributes that another module defines and the module itself does
        not."""
        defined = {name: set(private_names(tree)) for name, tree in self.trees.items()}
        anywhere = set().union(*defined.values())
        reads: Counter[str] = Counter()
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                    continue
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                if is_private and not is_own and node.attr in anywhere - defined[name]:
                    reads[name] += 1
        return reads

    @cached_property
    def class_names(self) -> dict[str, list[str]]:
        """Returns class names that several classes share, with the modules that define them."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
        return {name: modules for name, modules in found.items() if len(modules) > 1}

    @cached_property
    def root_names(self) -> list[str]:
        for node in self.trees["ibp"].body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return list(ast.literal_eval(node.value))
        raise ValueError("ibp/__init__.py assigns no __all__")

    @property
    def words(self) -> int:
        return sum(len(re.findall(r"\w+", path.read_text())) for path in sorted((self.root / "docs").rglob("*.md")))

    @property
    def lines(self) -> int:
        sources = [*(self.root / "ibp").rglob("*.py")]
        sources += [path for path in (self.root / "csrc").rglob("*") if path.suffix in C_SOURCES]
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes except those under `if TYPE_CHECKING`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            waiting.extend(ast.iter_child_nodes(node))


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yields private names that a module defines: functions, classes, variables, and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        if name.startswith("_"):
            yield name


def strongly_connected(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yields the strongly connected components of a graph, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                yield from visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            start = stack.index(name)
            group = stack[start:]
            del stack[start:]
            yield group

    for name in graph:
        if name not in index:
            yield from visit(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the names behind the counts too")
    listed = parser.parse_args().list
    package = Package()
    rows: list[tuple[str, int, list[str]]] = [
        ("imports against the order of floors", len(package.upward_imports), package.upward_imports),
        ("files in circles", sum(map(len, package.circles)), [", ".join(circle) for circle in package.circles]),
        (
            "reads of other files' private attributes",
            sum(package.private_reads.values()),
            [f"{count:4} {name}" for name, count in package.private_reads.most_common()],
        ),
        ("names at the root", len(package.root_names), []),
        (
            "class names of several classes",
            len(package.class_names),
            [f"{name}: {', '.join(modules)}" for name, modules in sorted(package.class_names.items())],
        ),
        ("words of docs/", package.words, []),
        ("lines of ibp/ and csrc/", package.lines, []),
    ]
    for title, count, names in rows:
        print(f"{count:8,} {title}")
        for name in names if listed else ():
            print(f"         {name}")


if __name__ == "__main__":
    main()
