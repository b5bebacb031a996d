"""Hook of mkdocs.yml: adds pages that lie outside docs/, and rewrites Markdown for GitHub so that it works on the site.

On GitHub a link is a path relative to the page's folder. The site has the same pages in other places, so that links are
rewritten. A link leads to a page of the site if there is one; otherwise to a page that shows the target (source code, a
list of a folder's files), or to a copy of it (images, tables of numbers). Pages of the site need nothing from another
host.
"""

import ast
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Pages that lie outside docs/: place in the site, place in the repository.
PAGES = {
    "index.md": "README.md",
    "tour.md": "examples/tour.ipynb",
    "man.md": "docs/ibp.1",
    "format.md": "csrc/FORMAT.md",
    "performance.md": "benchmarks/RESULTS.md",
    "measuring.md": "benchmarks/README.md",
    "papers.md": "benchmarks/PAPERS.md",
    "data.md": "data/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
# Languages of linked files that a page shows. Files with other endings are copied.
LANGUAGES = {".c": "c", ".h": "c", ".cu": "cuda", ".cuh": "cuda", ".cpp": "c++", ".py": "python", ".sh": "sh"}
FENCE = re.compile(r"\s*(```+|~~~+)(.*)")
NAME = re.compile(r"(?<!\[)`(ibp(?:\.\w+)+)`")  # This finds the name of an object in backticks, outside links.
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")  # This finds the text and the target of a link.


def text_of(path):
    """Returns a page as Markdown. For a notebook these are its cells and their outputs, for the man page its text."""
    text = (ROOT / path).read_text()
    if path.endswith(".ipynb"):
        return text_of_notebook(json.loads(text))
    return text_of_man_page(text) if path.endswith(".1") else text


def text_of_notebook(notebook):
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = [output.get("text") or output["data"]["text/plain"] for output in cell.get("outputs", [])]
        printed = "\n".join("".join(lines).rstrip("\n") for lines in outputs)
        parts += [f"```text\n{printed}\n```"] * bool(printed)
    return "\n\n".join(parts) + "\n"


def text_of_man_page(roff):
    """Returns the man page as Markdown: each command gets a heading, followed by what tools/command_line.py has written
    as roff."""
    parts, lines = ["# ibp(1)"], []
    for line in [*roff.splitlines(), ".SH"]:
        macro, _, words = line.partition(" ")
        if macro in (".SH", ".SS"):
            text = "\n".join(lines).replace("\\&", "").replace("\\-", "-").replace("\\e", "\\").strip()
            parts += [f"```text\n{text}\n```"] * bool(text)
            parts += [f"{'##' if macro == '.SH' else '###'} {words if macro == '.SS' else words.capitalize()}"] * bool(
                words
            )
            lines = []
        elif macro in (".sp", ".PP", ".TP"):
            lines.append("")
        elif macro in (".B", ".I"):
            lines.append(words)
        elif macro not in (".TH", ".nf", ".fi"):
            lines.append(line)
    return "\n\n".join(parts) + "\n"


def origin(uri):
    """Returns where a page of the site lies in the repository."""
    return PAGES.get(uri, f"docs/{uri}")


def outside_fences(text):
    """Yields (line, whether it is text) for every line. Lines of fenced code and the fences themselves are not text."""
    closing = None
    for line in text.split("\n"):
        fence = FENCE.match(line)
        yield line, closing is None and fence is None
        if fence and closing is None:
            closing = fence[1]
        elif fence and fence[1].startswith(closing) and not fence[2].strip():
            closing = None


def linked_paths(path):
    """Returns the paths that a page of the repository links to, relative to the repository's root."""
    text = "\n".join(line for line, is_text in outside_fences(text_of(path)) if is_text)
    targets = {target.partition("#")[0] for _, target in LINK.findall(text) if not re.match(r"[a-z]+:", target)}
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for target in targets - {""}}


def shown(config, path):
    """Returns the site's files for a linked file or folder that is not a page. The first one is the target of the
    link."""
    source = ROOT / path
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    if source.is_dir():
        names = sorted(child.name for child in source.iterdir() if child.is_file() and not child.name.startswith("."))
        text = head + f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
        copies = [File.generated(config, f"files/{path}/{name}", abs_src_path=str(source / name)) for name in names]
        return [File.generated(config, f"files/{path}/index.md", content=text), *copies]
    if source.suffix in LANGUAGES or not source.suffix:
        fence = "`" * 6
        text = f"{head}# {path}\n\n{fence}{LANGUAGES.get(source.suffix, 'text')}\n{source.read_text()}{fence}\n"
        return [File.generated(config, f"files/{path}.md", content=text)]
    return [File.generated(config, f"files/{path}", abs_src_path=str(source))]


def title_of(path):
    """Returns the first heading of a page."""
    return next(line for line in text_of(path).split("\n") if line.startswith("# "))[2:]


def names_in_the_reference():
    """Returns the objects that pages of docs/api show, either alone or through the `__all__` of their module."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    shown = {name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}
    return shown | {f"{name}.{member}" for name in shown for member in members_of(name)}


def members_of(name):
    """Returns the names in the `__all__` of a package of ibp, or an empty list if the name is not a package's."""
    path = ROOT.joinpath(*name.split("."), "__init__.py")
    nodes = ast.parse(path.read_text()).body if path.exists() else []
    lists = (node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    return [member for node in lists for member in ast.literal_eval(node.value)]


# Path in the repository: place in the site. on_files fills it before pages are rendered.
PLACES: dict[str, str] = {}


def on_files(files, config):
    PLACES.clear()
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, content=text_of(path)))
    PLACES.update({origin(file.src_uri): file.src_uri for file in files})
    pages = [origin(file.src_uri) for file in files.documentation_pages()]
    for path in sorted({path for page in pages for path in linked_paths(page)} - PLACES.keys()):
        if (ROOT / path).exists():
            first, *others = shown(config, path)
            PLACES[path] = first.src_uri
            for file in (first, *others):
                if file.src_uri not in files.src_uris:
                    files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links for a page's place in the site, links names to the reference, and turns words after a fence's
    language into its title."""
    here, names = origin(page.file.src_uri), names_in_the_reference()

    def link(match):
        text, (target, _, anchor) = match[1], match[2].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if not target or path not in PLACES or re.match(r"[a-z]+:", target):
            return match[0]
        place = posixpath.relpath(PLACES[path], posixpath.dirname(page.file.src_uri) or ".")
        if re.fullmatch(r"[\w./-]+\.(md|ipynb)", text) and not PLACES[path].startswith("files/"):
            text = title_of(path)  # GitHub shows a path, and the site shows a title.
        return f"[{text}]({place}{'#' + anchor if anchor else ''})"

    def name(match):
        return f"[{match[0]}][{match[1]}]" if match[1] in names else match[0]

    def fence(line):
        marks, language, words = re.fullmatch(r"(\s*(?:```+|~~~+))(\S*)\s*(.*)", line).groups()
        needs = [{"gpu": "a GPU"}.get(word, word) for word in words.split() if word != "fragment"]
        return f"{marks}{language}" + (f' title="needs {", ".join(needs)}"' if needs else "")

    rewritten = []
    for line, is_text in outside_fences(markdown):
        if is_text:
            line = LINK.sub(link, line)
            line = line if line.startswith("#") else NAME.sub(name, line)
        elif re.match(r"\s*(```+|~~~+)\w+ \w", line):
            line = fence(line)
        rewritten.append(line)
    return "\n".join(rewritten)
