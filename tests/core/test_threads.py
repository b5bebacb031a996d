"""The C core under ThreadSanitizer: threads that share what ibp.h says they may."""

import os

import pytest

from native import INCLUDES, TESTS, WARNINGS, c_compiler, compiled, core_objects, cxx_compiler, linked, run, written

pytestmark = pytest.mark.slow
THREADS = ["-O1", "-g", "-fsanitize=thread"]
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1"}


def program(*defined):
    command = [*cxx_compiler(), "-std=c++17", *THREADS, *WARNINGS, *INCLUDES, *defined]
    objects = compiled([(command, TESTS / "threads.cpp")])
    return linked([*cxx_compiler(), *THREADS, "-pthread"], [*objects, *core_objects(THREADS)])


@pytest.fixture(scope="module", autouse=True)
def sanitizer():
    """Skips where programs with ThreadSanitizer cannot be made, or do not run: some kernels place memory where it has
    no shadow for it."""
    source = written("empty.c", "int main(void) { return 0; }\n")
    try:
        code, output = run([linked([*c_compiler(), *THREADS], core_objects(THREADS, [source]))])
    except AssertionError as error:
        pytest.skip(f"the C compiler has no ThreadSanitizer: {error}")
    if code != 0:
        pytest.skip(f"ThreadSanitizer does not run here: {output[-200:]}")


def test_threads_share_what_they_may():
    code, output = run([program()], env={**os.environ, **OPTIONS}, timeout=120)
    assert code == 0 and "threads agree" in output, output[-6000:]


def test_a_race_is_found():
    code, output = run([program("-DPLANTED_RACE")], env={**os.environ, **OPTIONS}, timeout=120)
    assert code != 0 and "ThreadSanitizer: data race" in output, output[-3000:]
