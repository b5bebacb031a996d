"""README.md, docs/*.md and their like: their code runs, their links lead somewhere.

The first word after a fence says what a block is. `python` blocks of one file run one after the other with the same
names; further words say what a block needs: `gpu`, or modules. A block is left out if one of them is missing, or is of
an older release than pages are written for. `c` blocks are translation units, which are compiled, and run if they have
a main(); a second word `fragment` marks C that belongs into a function of the reader's. The commands of `sh` blocks
must exist. `text` is output.
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ibp
from ibp._cli.main import make_parser
from ibp.integrations.shared import numbers
from native import CORE_SOURCES, CSRC, INCLUDES, PLAIN, ROOT, c_compiler, compiled, core_objects, linked, run, written

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]
LANGUAGES = {"python", "python gpu", "c", "c fragment", "cuda", "cmake", "make", "sh", "text"}
# Modules that blocks may need.
MODULES = {"accelerate", "dgl", "diffusers", "flexgen", "peft", "pyg_lib", "scipy", "torch_geometric", "transformers"}
PACKAGES = {"zstandard"}  # optional, without which blocks are left out
WRITTEN_FOR = {"transformers": "5.24"}  # whose arguments have other names before
MAX_COLUMNS = 80  # of code
MAX_ENTRIES = 24  # of the menu, in five groups
names_of_pages = {"ids": lambda page: page.name}


def blocks_of(page):
    """(line number, words after the fence, text) of every fenced block."""
    found, opened = [], None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.match(r"\s*```(.*)", line)
        if fence and opened is None:
            opened = number, fence.group(1).strip(), []
        elif fence:
            found.append((*opened[:2], "\n".join(opened[2]) + "\n"))
            opened = None
        elif opened:
            opened[2].append(line)
    assert opened is None, f"the fence in line {opened[0]} of {page.name} is not closed"
    return found


def blocks(*kinds):
    return [
        pytest.param(page, block, id=f"{page.name}-{block[0]}")
        for page in PAGES
        for block in blocks_of(page)
        if block[1] in kinds
    ]


@pytest.mark.parametrize("page", PAGES, **names_of_pages)
def test_fences_say_what_they_hold(page):
    kinds = {
        " ".join(word for word in kind.split() if word not in MODULES | PACKAGES) for _, kind, _ in blocks_of(page)
    }
    assert kinds <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, **names_of_pages)
def test_code_is_narrow(page):
    wide = [line for _, _, text in blocks_of(page) for line in text.splitlines() if len(line) > MAX_COLUMNS]
    assert not wide


def is_there(need):
    """Whether a GPU, or a module of a release that pages are written for, is."""
    if need == "gpu":
        return torch.cuda.is_available() and ibp.cuda_is_available()
    if importlib.util.find_spec(need) is None:
        return False
    return need not in WRITTEN_FOR or numbers(importlib.metadata.version(need)) >= numbers(WRITTEN_FOR[need])


def marks_of(page):
    """Pages with blocks that need a host framework are read where those are installed."""
    needs_modules = any(MODULES & set(kind.split()) for _, kind, _ in blocks_of(page))
    return [pytest.mark.frameworks] if needs_modules else []


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity")  # of DGL, whose class pytest-xdist would import
@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in PAGES], **names_of_pages)
def test_python(page, tmp_path, monkeypatch):
    """Blocks that need a GPU, or a module, are left out without it; they are compiled nevertheless. Their own calls
    take no name that is about to go."""
    monkeypatch.chdir(tmp_path)
    warnings.filterwarnings("error", category=FutureWarning, module=re.escape(page.stem))
    names = {"__name__": page.stem}
    for number, kind, text in blocks_of(page):
        if kind.startswith("python"):
            code = compile("\n" * number + text, page, "exec")  # errors name the line of the page
            if all(is_there(need) for need in kind.split()[1:]):
                exec(code, names)


@pytest.mark.parametrize("page, block", blocks("c"))
def test_c(page, block, tmp_path):
    """A program prints what the next `text` block of the page says."""
    number, _, text = block
    source = written(f"docs/{page.stem}_{number}.c", text)
    objects = compiled([([*c_compiler(), "-std=c11", *PLAIN, *INCLUDES], source)])
    if re.search(r"\bmain\s*\(", text):
        core = core_objects(PLAIN, [*CORE_SOURCES, CSRC / "cuda" / "no_cuda.c"])
        code, output = run([linked(c_compiler(), [*objects, *core])], cwd=tmp_path, timeout=60)
        printed = next((text for other, kind, text in blocks_of(page) if kind == "text" and other > number), output)
        assert (code, output) == (0, printed)


def is_command(words):
    """Whether it exists: a target of the Makefile, a module or script of Python, a program."""
    words = words[
        next((i for i, word in enumerate(words) if not re.fullmatch(r"\w+=.*", word)), len(words)) :
    ]  # VARIABLE=value before a command
    if words[:1] == ["make"]:
        directory = words[words.index("-C") + 1] if "-C" in words else "."
        targets = [word for word in words[1:] if re.fullmatch(r"[a-z][\w-]*", word) and word != directory]
        rules = (ROOT / directory / "Makefile").read_text()
        return all(
            re.search(rf"^([\w $()./-]* )?{target}( [\w $()./-]*)?:(?!=)", rules, re.MULTILINE) for target in targets
        )
    if words[:1] == ["torchrun"]:  # of the reader's Python: what it runs follows its options
        words = ["python", *words[next((i for i, word in enumerate(words) if re.fullmatch(r"-m|.*\.py", word)), 0) :]]
    if words and re.fullmatch(r"(.*/)?python[\d.]*", words[0]):
        module = re.fullmatch(r"(ibp|benchmarks|examples|tools)((\.\w+)*)", words[2]) if words[1:2] == ["-m"] else None
        path = ROOT / (words[2].replace(".", "/") if module else words[1] if len(words) > 1 else "")
        return words[1:2] == ["-m"] and not module or path.exists() or path.with_suffix(".py").exists()
    # ./program is what a line before has made; pip and ibp are those of the reader's Python.
    known = ("pip", "ibp", "export", "cd", "eval", "exit")
    return not words or words[0] in known or words[0].startswith("./") or bool(shutil.which(words[0]))


@pytest.mark.parametrize("page, block", blocks("sh"))
def test_commands(page, block):
    """They are not run: some install, some take minutes, some need what is not everywhere."""
    subprocess.run(["sh", "-n"], input=block[2], text=True, check=True)
    for line in re.sub(r"(^|\s)#.*", "", block[2].replace("\\\n", " "), flags=re.MULTILINE).splitlines():
        for command in re.split(r"&&|\|\||[|;]", line):
            assert is_command(shlex.split(command)), line


@pytest.mark.parametrize(
    "commands",
    [
        "make demo",
        "make test PYTEST_ARGS=-x",
        "MAX_JOBS=2 pip install .",
        "python -m benchmarks",
        "python examples/demo.py",
        "sh -c x",
    ],
)
def test_commands_that_exist(commands):
    assert is_command(shlex.split(commands))


@pytest.mark.parametrize(
    "commands", ["make tests", "python -m benchmarks.none", "python examples/none.py", "no_such_program"]
)
def test_commands_that_do_not_exist(commands):
    assert not is_command(shlex.split(commands))


# ---- links ---------------------------------------------------------------------------------------------------------

API_PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
ALL_PAGES = sorted(
    {
        *PAGES,
        *API_PAGES,
        *ROOT.glob("*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("benchmarks/*.md"),
        CSRC / "FORMAT.md",
    }
)


def text_of(page):
    """The page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^\s*```.*?^\s*```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Relative links and images: the file exists, and so does the heading."""
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page)) + re.findall(
        r'<(?:img|a)[^>]+(?:src|href)="([^"]+)"', text_of(page)
    )
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), (
                f"{link}: the headings of {target.name} are {sorted(anchors_of(target))}"
            )


# ---- the reference -------------------------------------------------------------------------------------------------


def test_the_reference_has_every_public_name():
    """Pages of docs/api name each object once, and every public one: itself, or the module that shows it."""
    named = [name for page in API_PAGES for name in re.findall(r"^::: ibp\.(\S+)$", page.read_text(), re.MULTILINE)]
    assert sorted(named) == sorted(set(named))
    shown = set(named)
    for name in named:
        is_module = name not in ibp.__all__ or isinstance(getattr(ibp, name), ModuleType)
        if is_module and not name.startswith("integrations."):  # which need a framework
            shown |= set(importlib.import_module(f"ibp.{name}").__all__)
    assert set(ibp.__all__) - shown - {"integrations"} == set()


# ---- the changelog ---------------------------------------------------------------------------------------------------


def names_of_the_next_release():
    """Returns the code of the changelog's first section, as a list of pieces: what the first column of its table of
    changed names holds, and what all else holds."""
    section = re.split(r"^## .*\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    table = re.search(r"^\| [\d.]+ \| now \|\n.*?\n\n", section, re.MULTILINE | re.DOTALL)[0]
    cells = re.findall(r"^\|(.*?)\|", table, re.MULTILINE)
    rest = section.replace(table, re.sub(r"^\|.*?\|", "|", table, flags=re.MULTILINE))
    return [re.findall(r"`([^`]+)`", text) for text in ("\n".join(cells), rest)]


def python_name(name):
    """Returns what a public name such as ibp.File.verify stands for, or None. Modules of ibp.integrations need
    frameworks: they are not imported, but their text has to define or list the name."""
    first, *others = name.split(".")[1:]
    if first == "integrations" and others:
        spec = importlib.util.find_spec(f"ibp.integrations.{others[0]}")
        text = Path(spec.origin).read_text() if spec else ""
        there = [re.search(rf'^(?:def|class) {part}\b|"{part}"', text, re.MULTILINE) for part in others[1:]]
        return spec if all(there) else None
    root = ibp if first in dir(ibp) else None  # which also has, unlisted, classes that pickles of 0.2 name
    return functools.reduce(lambda thing, part: getattr(thing, part, None), [first, *others], root)


def names_in(pieces, pattern):
    return {name for piece in pieces for name in re.findall(rf"(?<![\w.]){pattern}", piece)}


def test_the_changelog_names_what_there_is():
    """Every name of Python, C and the command line that the section of the next release has in code exists, with the
    arguments that a call names; those in the first column of the table of changed names do not."""
    old, new = names_of_the_next_release()
    python = r"ibp(?:\.\w+)+"
    assert {name for name in names_in(new, python) if python_name(name) is None} == set()
    assert {name for name in names_in(old, python) if python_name(name) is not None} == set()
    for name, arguments in names_in(new, rf"({python})\(([^)]*)\)"):
        assert set(re.findall(r"(\w+)=", arguments)) <= set(inspect.signature(python_name(name)).parameters), name

    headers = " ".join(path.name + path.read_text() for path in (CSRC / "include").iterdir())
    declared = set(re.findall(r"\bibp_\w+", headers))
    assert names_in(new, r"ibp_\w+") - declared == set() == names_in(old, r"ibp_\w+") & declared

    commands = make_parser().format_help().split()
    assert names_in(new, r"ibp ([a-z]+)") - set(commands) == set()


# ---- the site ------------------------------------------------------------------------------------------------------


def test_the_site_has_every_page_once():
    """mkdocs.yml has in its menu, or lists as linked from a page there, the pages of docs/ and those that
    tools/site_pages.py takes from elsewhere."""
    config = (ROOT / "mkdocs.yml").read_text()
    menu = re.findall(r"^ +- .*: (\S+\.md)$", config, re.MULTILINE)
    linked = re.findall(r"^  /(\S+\.md)$", config, re.MULTILINE)
    taken = re.findall(r'^ {4}"(\S+\.md)": "(\S+)"', (ROOT / "tools" / "site_pages.py").read_text(), re.MULTILINE)
    there = [str(page.relative_to(ROOT / "docs")) for page in DOCS]
    assert [path for _, path in taken if not (ROOT / path).exists()] == []
    assert sorted([*menu, *linked]) == sorted([*there, *(name for name, _ in taken)])
    assert len(menu) <= MAX_ENTRIES
    places = dict(taken)
    shown = [ROOT / places.get(name, f"docs/{name}") for name in menu]
    targets = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in shown
        for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    }
    assert [name for name in linked if ROOT / places.get(name, f"docs/{name}") not in targets] == []


# ---- the README on a package index -----------------------------------------------------------------------------------


def test_readme_of_the_index(tmp_path):
    """It shows no image and follows no link that only the repository has."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    text = (tmp_path / "ibp.egg-info" / "PKG-INFO").read_text()
    assert "# ibp" in text and "ibp.compress(x)" in text
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith(("http", "#"))] == []


# ---- the map -------------------------------------------------------------------------------------------------------


def test_the_map_matches_the_tree():
    """Every path that docs/architecture.md names exists, and every folder of the sources is named."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:csrc|ibp|tests|benchmarks|examples|data|tools)/[\w./*]*)`", text))
    assert [path for path in sorted(named) if not list(ROOT.glob(path.rstrip("/")))] == []
    folders = {
        path.parent.relative_to(ROOT) for pattern in ("csrc/**/*.c*", "ibp/*/**/*.py") for path in ROOT.glob(pattern)
    }
    assert [str(folder) for folder in folders if not any(folder.is_relative_to(name) for name in named)] == []
