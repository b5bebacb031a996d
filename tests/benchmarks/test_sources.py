"""Which CSVs are older than the code that they measure."""

import subprocess

import pytest

from benchmarks import claims, harness, reading, sources

RESULTS = reading.Results(harness.RESULTS)


def git(root, *words):
    who = ("-c", "user.name=x", "-c", "user.email=x@x")
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


def change(root, path, text):
    """A commit that writes a file. @return its id."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-m", "x")
    return sources.git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init")
    return tmp_path


def test_every_csv_has_sources_that_exist():
    names = {path.stem for path in harness.RESULTS.glob("*.csv")}
    assert names == sources.SOURCES.keys() | set(sources.NO_SCRIPT)
    paths = {path for csv in sources.SOURCES for path in sources.paths_of(csv)}
    assert [path for path in sorted(paths) if not (harness.ROOT / path).exists()] == []


def test_a_csv_is_stale_once_its_code_changes(repository):
    measured = change(repository, "csrc/cuda/rows/a.cu", "1")
    (repository / "gather.csv").write_text(f"commit\n{measured}\n{measured}-dirty\n")
    (repository / "cpu.csv").write_text(f"commit\n{'0' * 40}\n")
    (repository / "ratio.csv").write_text("set\nx\n")
    results = reading.Results(repository)
    assert [age.changes for age in sources.ages(repository, results)] == [None, 0, 0]
    change(repository, "csrc/cuda/kv/b.cu", "another part")
    assert sources.report(repository, results)[-1] == "1 of 2 CSVs are stale"
    change(repository, "csrc/cuda/rows/a.cu", "2")
    change(repository, "benchmarks/gather.py", "3")
    line = f"gather.csv, {measured[:10]}: later commits that change its code: 2"
    assert sources.report(repository, results) == [
        *("cpu.csv, 0000000000: not in this history", line, line),
        *("ratio.csv names no commit", "2 of 2 CSVs are stale"),
    ]


def test_without_history_it_is_said(repository, tmp_path_factory):
    for number in range(2):
        change(repository, "a", str(number))
    shallow = tmp_path_factory.mktemp("shallow")
    git(shallow, "clone", "--depth", "1", f"file://{repository}", "copy")
    bare_tree = tmp_path_factory.mktemp("tree")
    for root in (shallow / "copy", bare_tree):
        assert sources.report(root, reading.Results(root)) == [
            "no whole git history here: which CSVs are older than their code cannot be told"
        ]


def test_pages_name_commits_that_git_has(capsys):
    """The list is printed whatever it says; a CSV of a commit that nobody can check out is a fault."""
    assert claims.main(["--stale"]) == 0
    said = capsys.readouterr().out
    if not sources.has_history(harness.ROOT):
        assert said.startswith("no whole git history")
        return
    assert said.splitlines() == sources.report(harness.ROOT, RESULTS)
    assert [age for age in sources.ages(harness.ROOT, RESULTS) if age.changes is None] == []


def test_a_table_names_the_commits_of_the_csvs_that_it_reads(tmp_path):
    (tmp_path / "gather.csv").write_text("commit\n1234567890ab\n1234567890ab\nabcdef123456\n")
    (tmp_path / "ratio.csv").write_text("set\nx\n")
    results = reading.Results(tmp_path)
    for name in ("gather", "ratio"):
        results.rows(name)
    assert sources.measured_at(results) == "gather 1234567890 abcdef1234"
