"""The build backend that pyproject.toml names: setuptools', after a look at what a build needs.

ibp is built against the torch that it runs with. `pip install .` builds in an environment of its own, which has none:
it ends here, before torch is downloaded or anything is compiled, with the commands that work.
"""

import os
import shlex
import sys

from requirements import is_met, read


def require():
    """Ends the build with a sentence if a requirement is not met."""
    needed = read("requires")
    if not os.environ.get("IBP_TORCH_DIR"):  # names a torch for setup.py
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
    """A hook of the backend that looks first. pip starts with one of these four, with and without build isolation."""

    def look_first(*arguments, **options):
        require()
        return hook(*arguments, **options)

    return look_first


get_requires_for_build_wheel = checked(build_meta.get_requires_for_build_wheel)
get_requires_for_build_editable = checked(build_meta.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = checked(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = checked(build_meta.prepare_metadata_for_build_editable)
