"""The serving adapters with the Python files of released engines, where tools/record_interfaces.py has unpacked some:
in build/engines, or in the folder that IBP_ENGINES names. Elsewhere test_serving_interfaces.py alone holds the adapters
to what was written down of these releases.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from native import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import record_interfaces as tool  # noqa: E402

FOLDER = Path(os.environ.get("IBP_ENGINES", tool.ENGINES))
RELEASES = sorted(FOLDER.glob("*-*"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RELEASES, reason=f"no release of an engine is unpacked in {FOLDER}"),
]
every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)


@every_release
def test_what_is_written_down(release):
    """The record in interfaces/, where there is one, is the release's."""
    written = tool.INTERFACES / f"{release.name}.json"
    if not written.exists():
        pytest.skip(f"nothing is written down of {release.name}: run tools/record_interfaces.py")
    differs = list(tool.changes(json.loads(written.read_text()), json.loads(json.dumps(tool.record(release)))))
    assert not differs, f"{written.name} differs from {release}: {'; '.join(differs)}"


@every_release
def test_adapters_with_its_classes(release):
    """tools/try_adapters.py, in a process of its own: the release's classes are imported there."""
    command = [sys.executable, str(ROOT / "tools" / "try_adapters.py"), str(release)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if done.returncode:
        pytest.fail("\n".join([f"{release.name}: {done.stdout}{done.stderr}", *tool.since(tool.record(release))]))
