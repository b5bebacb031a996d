"""The build backend that pyproject.toml names. It first checks the requirements of a build, then calls setuptools'
backend.

ibp is built against the torch that it runs with. `pip install .` builds in an isolated environment, which has no torch.
In that case the build ends here with the commands that work, before torch is downloaded or anything is compiled.
"""

import os
import shlex
import sys

from requirements import is_met, read


def require():
    """Ends the build with a sentence if a requirement is not met."""
    needed = read("requires")
    # If IBP_TORCH_DIR is set, setup.py uses the torch in that folder.
    if not os.environ.get("IBP_TORCH_DIR"):
        needed += [requirement for requirement in read("dependencies") if requirement.startswith("torch")]
    lacking = [requirement for requirement in needed if not is_met(requirement)]
    if lacking:
        sys.exit(
            f"ibp: {', '.join(lacking)} cannot be found by {sys.executable}, where ibp is being built. Type\n"
            f"    pip install {shlex.join(needed)}\n    pip install --no-build-isolation ."
        )


try:
    from setuptools import build_meta
    from setuptools.build_meta import *  # noqa: F403
except ImportError:
    require()
    raise


def checked(hook):
    """Returns a hook of the backend that first checks the requirements. pip starts with one of the four hooks below,
    with and without build isolation."""

    def look_first(*arguments, **options):
        require()
        return hook(*arguments, **options)

    return look_first


get_requires_for_build_wheel = checked(build_meta.get_requires_for_build_wheel)
get_requires_for_build_editable = checked(build_meta.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = checked(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = checked(build_meta.prepare_metadata_for_build_editable)
