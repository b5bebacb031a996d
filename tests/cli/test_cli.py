"""The command line: its frame. Tests of commands are in other files."""

import ast
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ibp
from ibp._cli import main as frame
from ibp._cli import output

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("compress", "decompress", "verify", "inspect", "estimate", "diff", "apply", "doctor")
LIMIT_S = 60


def run(*arguments):
    return frame.main([str(argument) for argument in arguments])


def program(*arguments, **options):
    """The command line as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("environment", {})}
    command = [sys.executable, "-c", "import sys, ibp_command; ibp_command.program()", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, **options)


# ---- help, version, usage ----


def test_help_and_version_do_not_import_torch():
    look = (
        "import sys, ibp_command\n"
        "for sys.argv in (['ibp', '--help'], ['ibp', '--version'], ['ibp', 'doctor', '--help']):\n"
        "    try: ibp_command.program()\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "assert 'torch' not in sys.modules and 'ibp' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert f"ibp {ibp.__version__}\n" in done.stdout


def test_the_command_line_imports_ibp_by_its_name():
    """The program loads the folder without the package around it: relative imports stay inside."""
    folder = ROOT / "ibp" / "_cli"
    for path in folder.rglob("*.py"):
        depth = len(path.relative_to(folder).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.level <= depth, f"{path}:{node.lineno}"


@pytest.mark.slow
def test_the_program_does_the_work(tmp_path):
    ibp.save(tmp_path / "x.safetensors", {"x": ibp.compress(torch.ones(100, 100), device="cpu")})
    done = program("verify", "x.safetensors", "--content", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "good" in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_fits_a_terminal(arguments, capsys):
    assert run(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: ibp") and max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["verify"],
        ["decompress", "x", "-o", "y", "--format", "zip"],
        ["doctor", "--wrong"],
        ["bench", "--wrong", "-q"],
    ],
    ids=str,
)
def test_wrong_usage_is_one_line(arguments, capsys):
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and re.fullmatch(r"ibp[^\n]*: [^\n]+; see ibp[^\n]* --help\n", shown.err)


@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["decompres"], "decompress"),
        (["inspct", "x"], "inspect"),
        (["compress", "x", "-o", "y", "--scheme", "plane"], "planes"),
    ],
    ids=str,
)
def test_a_misspelt_word_gets_the_one_that_was_meant(arguments, meant, capsys):
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and re.fullmatch(rf"ibp[^\n]* \(did you mean '{meant}'\?\); see [^\n]+\n", shown.err)


@pytest.mark.parametrize(
    "text, num_bytes",
    [("4096", 4096), ("5G", 5 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("7B", 7), ("2k", 2048)],
)
def test_sizes(text, num_bytes):
    assert frame.size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "5X", "1e9", "0", "0.1", "5 iB", "nan", "9" * 400, "9999999T"])
def test_sizes_that_are_none(text):
    with pytest.raises(frame.argparse.ArgumentTypeError):
        frame.size(text)


# ---- what is printed ----


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes_shown(num_bytes, text):
    assert output.show_size(num_bytes) == text


def reported(capsys, name):
    """The lines of a table with a name, and of a sentence."""
    arguments = frame.argparse.Namespace(json=False, quiet=False)
    output.report(arguments, {}, output.table(["tensor", ">bytes"], [[name, "1,000"]]), "a sentence " * 90)
    return capsys.readouterr().out.splitlines()


NAME = "model.layers." + 30 * "long." + "weight"


def test_names_are_whole_in_pipes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = reported(capsys, NAME)
    assert f"{NAME}  1,000" in lines and max(len(line) for line in lines if "sentence" in line) <= 80


@pytest.mark.parametrize("columns, width", [(40, 80), (80, 80), (100, 100), (400, 400)])
def test_tables_and_sentences_fill_a_terminal(capsys, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = reported(capsys, NAME)
    assert max(map(len, lines)) <= width and max(len(line) for line in lines if "sentence" in line) > width - 12
    assert NAME in "".join(line.removesuffix("1,000").strip() for line in lines)
    assert any(NAME in line for line in lines) == (width == 400)


def test_names_cannot_control_the_terminal():
    assert output.shown("a\x1b[31m\n\u202eb c") == "a\\x1b[31m\\n\\u202eb c"


@pytest.mark.parametrize("encoding, rule", [("utf-8", "─"), ("ascii", "-")])
def test_a_table_line_by_line(monkeypatch, encoding, rule):
    """Without rich, which takes a third of a millisecond for each cell. Wide characters take two cells."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding, "strict"))
    lines = output.table(["tensor", ">bytes", "kind"], [["a" * 10, "1,000", "x"], ["b" * 25, "7", "yy"]])
    assert list(lines(33)) == [
        f"{'tensor':20}  bytes  kind",
        rule * 33,
        f"{'a' * 10:20}  1,000  x   ",
        f"{'b' * 20}      7  yy  ",
        "b" * 5,
    ]
    assert list(output.table(["", ""], [["a", "b"], ["cc", "d"]])(80)) == ["a   b", "cc  d"]
    if encoding == "utf-8":
        assert list(output.table(["", ""], [["\u8868\u8868", "b"], ["e\u0301", "d"]])(5)) == [
            "\u8868  b", "\u8868", "e\u0301   d",
        ]  # fmt: skip


def test_markup_in_names_is_text(capsys):
    arguments = frame.argparse.Namespace(json=False, quiet=False)
    output.report(arguments, {}, output.table(["tensor"], [["[bold]x[/bold]:smile:"]]))
    assert "[bold]x[/bold]:smile:" in capsys.readouterr().out


# ---- errors ----


def failing(monkeypatch, raised):
    """Runs `ibp doctor`, which raises an exception."""
    from ibp._cli import doctor

    def run_it(arguments):
        raise raised

    monkeypatch.setattr(doctor, "doctor", run_it)
    return run("doctor")


@pytest.mark.parametrize(
    "raised, status, said",
    [
        (output.Failure("it is so"), 2, "ibp doctor: it is so"),
        (output.Failure("it is wrong", 1), 1, "ibp doctor: it is wrong"),
        (FileNotFoundError(2, "No such file", "x.npy"), 2, "ibp doctor: x.npy: No such file"),
        (ValueError("two\nlines"), 2, "ibp doctor: two lines"),
        (MemoryError(), 2, "ibp doctor: there is not enough memory"),
        (ibp.CorruptTableError("row 3 is damaged"), 1, "ibp doctor: row 3 is damaged"),
        (KeyboardInterrupt(), 130, "ibp: interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_errors_are_one_line(raised, status, said, monkeypatch, capsys):
    assert failing(monkeypatch, raised) == status
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", said + "\n")


def test_warnings_are_one_line(monkeypatch, capsys):
    from ibp._cli import doctor

    def run_it(arguments):
        frame.warnings.warn("memory is\npageable", RuntimeWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(doctor, "doctor", run_it)
    assert run("doctor") == 0
    assert capsys.readouterr().err == "ibp: warning: memory is pageable\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    """stdout is a pipe that nobody reads from."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = "import sys, ibp_command; sys.argv = ['ibp', 'inspect', 'data/cora.npz']; ibp_command.program()"
    with open(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-c", command],
            cwd=ROOT,
            env=environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
        )
    assert (done.returncode, done.stderr) == (141, b"")


# ---- what is made from the parser ----


@pytest.fixture(scope="module")
def tool():
    """tools/command_line.py."""
    spec = importlib.util.spec_from_file_location("command_line", ROOT / "tools" / "command_line.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.version_info[:2] not in ((3, 11), (3, 12)), reason="other versions of argparse print otherwise")
def test_the_man_page_is_current(tool):
    assert tool.MAN_PAGE.read_text() == tool.man_page(), "python tools/command_line.py writes it"


def test_examples_print_what_the_page_says(tool):
    if ibp.cuda_is_available():
        pytest.skip("the page has what commands print without a GPU, which learns from other samples")
    text = tool.PAGE.read_text()
    assert tool.examples(text) == text
