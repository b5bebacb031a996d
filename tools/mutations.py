"""The small mistakes that `tools/mutate.py` puts into a source, one at a time.

A comparison becomes another one (< and <=, > and >=, == and !=, is and is not, in and not in). + becomes - and back,
`and` becomes `or` and back, True becomes False and back, 1 becomes 0 or 2, and 0 becomes 1.

Some code is left as it is: comments, strings, type annotations, code for type checkers, static assertions, preprocessor
lines, and the messages of exceptions, warnings and assertions.
"""

import ast
import bisect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SWAPPED = {
    "<": ("<=",),
    "<=": ("<",),
    ">": (">=",),
    ">=": (">",),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
    "+": ("-",),
    "-": ("+",),
    "+=": ("-=",),
    "-=": ("+=",),
    "and": ("or",),
    "or": ("and",),
    "&&": ("||",),
    "||": ("&&",),
    "True": ("False",),
    "False": ("True",),
    "true": ("false",),
    "false": ("true",),
    "1": ("0", "2"),
    "0": ("1",),
}


class Mutation(NamedTuple):
    path: str  # relative to the repository's root
    line: int  # from 1
    column: int  # in characters, from 0
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column + 1} `{self.was}` to `{self.becomes}`"

    def applied(self, text: str) -> str:
        """Returns the source with the mistake."""
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1]
        end = self.column + len(self.was)
        if line[self.column : end] != self.was:
            raise ValueError(f"{self.path}:{self.line} has {line[self.column : end]!r} where {self.was!r} was wanted")
        lines[self.line - 1] = line[: self.column] + self.becomes + line[end:]
        return "".join(lines)


def mutations_of(root: Path, path: str) -> list[Mutation]:
    """Returns all mutations of a file, in the order of its lines."""
    text = (root / path).read_text()
    found = places_in_python(text) if path.endswith(".py") else places_in_c(text)
    return [Mutation(path, *place, was, new) for place, was in sorted(found) for new in SWAPPED[was]]


Place = tuple[tuple[int, int], str]  # A place has (line, column) and the text that is there.


# ---- Python ----


def places_in_python(text: str) -> list[Place]:
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()]
    starts, lines = [token.start for token in tokens], text.splitlines()

    def between(start: ast.AST, end: ast.AST, wanted: tuple[str, ...]) -> Iterator[Place]:
        """Yields the operator between two nodes, if it is on one line."""
        after = (start.end_lineno, characters(start.end_lineno, start.end_col_offset))
        before = (end.lineno, characters(end.lineno, end.col_offset))
        first = bisect.bisect_left(starts, after)
        words = [
            t for t in tokens[first : bisect.bisect_left(starts, before)] if t.string in (*wanted, "not", "is", "in")
        ]
        word = " ".join(t.string for t in words)
        if word in wanted and lines[words[0].start[0] - 1].startswith(word, words[0].start[1]):
            yield words[0].start, word

    def characters(line: int, num_bytes: int) -> int:
        return len(lines[line - 1].encode()[:num_bytes].decode())

    comparisons = ("<", "<=", ">", ">=", "==", "!=", "is", "is not", "in", "not in")
    found: list[Place] = []
    for node in code_of(ast.parse(text)):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right in zip(operands, operands[1:], strict=False):
                found += between(left, right, comparisons)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            found += between(node.left, node.right, ("+", "-"))
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            found += between(node.target, node.value, ("+=", "-="))
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                found += between(left, right, ("and", "or"))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            found.append(((node.lineno, characters(node.lineno, node.col_offset)), "-"))
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int) and node.value in (0, 1):
            start, end = (characters(node.lineno, offset) for offset in (node.col_offset, node.end_col_offset))
            if lines[node.lineno - 1][start:end] in SWAPPED:
                found.append(((node.lineno, start), lines[node.lineno - 1][start:end]))
    return found


def code_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and the nodes inside it. Leaves out nodes that do not run, and messages."""
    if isinstance(node, ast.Raise | ast.JoinedStr) or is_warning(node) or is_overload(node):
        return
    yield node
    left_out: list[ast.AST] = []
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        left_out = [node.test, *node.body]
    elif isinstance(node, ast.Assert):
        left_out = [node.msg] if node.msg else []
    elif isinstance(node, ast.AnnAssign | ast.arg):
        left_out = [node.annotation] if node.annotation else []
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        left_out = [node.returns] if node.returns else []
    for child in ast.iter_child_nodes(node):
        if child not in left_out:
            yield from code_of(child)


def is_warning(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn")


def is_overload(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("overload" in ast.unparse(name) for name in node.decorator_list)


# ---- C ----

C_TOKEN = re.compile(
    r"""(?P<skipped>/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|^[ \t]*\#(?:\\\n|[^\n])*
        |\b(?:_Static_assert|static_assert)\b[^;]*;)
    |(?P<word>[A-Za-z_]\w*)
    |(?P<number>(?:0[xX])?[0-9][\w.]*)
    |(?P<operator><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\+=|-=|[^\s\w])""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
C_OPERATORS = ("<", "<=", ">", ">=", "==", "!=", "+", "-", "+=", "-=", "&&", "||")


def places_in_c(text: str) -> list[Place]:
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    found, line, before = [], 1, ""
    for match in C_TOKEN.finditer(text):
        if match.lastgroup == "skipped":
            continue
        while line < len(starts) and starts[line] <= match.start():
            line += 1
        place, token = (line, match.start() - starts[line - 1]), match.group()
        if match.lastgroup == "operator" and token in C_OPERATORS and not (token == "+" and not is_value(before)):
            found.append((place, token))
        elif match.lastgroup == "word" and token in ("true", "false"):
            found.append((place, token))
        elif match.lastgroup == "number" and re.fullmatch(r"[01][uUlL]*", token):
            found.append((place, token[0]))
        before = token
    return found


def is_value(token: str) -> bool:
    """Returns whether a binary operator can follow this token, because the token ends a value."""
    return token in (")", "]") or re.fullmatch(r"\w+", token) is not None and token not in ("return", "case")
