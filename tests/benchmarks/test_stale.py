"""benchmarks/stale.py: every CSV has sources that are there, and their changes are found where git has its history."""

import subprocess

import pytest

from benchmarks import harness, stale


def test_every_csv_has_its_sources():
    names = {path.stem for path in harness.RESULTS.glob("*.csv")}
    assert names - stale.SOURCES.keys() == set()
    missing = {
        source for sources in stale.SOURCES.values() for source in sources if not (harness.ROOT / source).exists()
    }
    assert missing == set()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Commits `measured`, then one that changes kernels, and one of words."""

    def commit(path, text):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_text(text)
        for words in (["add", "."], ["commit", "-qm", f"Change {path} to {text}"]):
            subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=tmp_path, check=True)
        return stale.git("rev-parse", "HEAD")

    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(stale, "SOURCES", {"speed": ("kernels",), "bytes": ()})
    if subprocess.run(["git", "init", "-q", str(tmp_path)]).returncode:
        pytest.skip("there is no git")
    measured = commit("kernels/some.cu", "old")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bytes.csv").write_text(f"commit\n{measured}\n")
    (tmp_path / "results" / "speed.csv").write_text(f"commit\n{measured}\n{measured}-dirty\n{'0' * 40}\n")
    commit("kernels/some.cu", "new")
    commit("words.md", "more")
    return measured


def test_changes_since_a_commit(repository, capsys):
    assert stale.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "speed.csv, 0000000000: git does not know the commit"
    start = f"speed.csv, {repository[:10]}: its sources have changed 1 times, last in "
    assert len(lines) == 2 and lines[1].startswith(start) and lines[1].endswith("Change kernels/some.cu to new")


def test_without_history(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    assert stale.main() == 0
    assert capsys.readouterr().out == "git's history is not here, or is shallow: the age of results is not known\n"


@pytest.mark.slow
def test_git_has_the_commits_that_pages_name():
    """The count of stale results may be anything; a commit that nobody can check out is a fault of a page."""
    if not stale.has_history():
        pytest.skip("git's history is not here, or is shallow")
    unknown = {name for name, _, changes in stale.stale() if changes is None and stale.SOURCES[name]}
    assert unknown == set()


def test_a_folder_inside_another_repository_has_no_history(repository, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", harness.ROOT / "results")
    assert not stale.has_history()
