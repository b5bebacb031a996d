"""Records which lines of Python and which blocks of C the processes of a test reach.

Each line and each block has a byte in a file that all processes map. The first process that reaches the line sets the
byte. This also works for processes that are forked, started or killed, whose lines coverage.py would lose. A `tracer`
sees lines of Python. C code calls `__sanitizer_cov_trace_pc` at the start of each block (gcc's
-fsanitize-coverage=trace-pc); TRACE_C implements it and is linked to the library.
"""

import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

C_BYTES = 2 << 20  # The library has less code than this many bytes. The bytes for Python's lines follow.
TRACED_BYTES = C_BYTES + (1 << 18)
TRACE_C = """
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

extern const char __ehdr_start[] __attribute__((visibility("hidden")));
static uint8_t *reached;

__attribute__((constructor, no_sanitize_coverage)) static void begin(void)
{
    const char *const path = getenv("IBP_REACHED");
    const int file = path == NULL ? -1 : open(path, O_RDWR);
    if (file < 0) return;
    void *const bytes = mmap(NULL, C_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (bytes != MAP_FAILED) reached = bytes;
    close(file);
}

void __sanitizer_cov_trace_pc(void);
__attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc(void)
{
    const uintptr_t at = (uintptr_t)__builtin_return_address(0) - (uintptr_t)__ehdr_start;
    if (reached != NULL && at < C_BYTES) reached[at] = 1;
}
""".replace("C_BYTES", str(C_BYTES))
# This sitecustomize.py starts the tracer in Python processes that tests start.
SITE = "import os\n\nif 'IBP_REACHED' in os.environ:\n    import tracing\n\n    tracing.use(tracing.tracer())\n"


def starts_of(tree: Path) -> dict[str, int]:
    """Returns where the bytes of each Python source start. The byte of line n is at start + n."""
    starts, at = {}, C_BYTES
    for path in sorted([*tree.glob("ibp/**/*.py"), tree / "ibp_command.py"]):
        starts[str(path)] = at
        at += len(path.read_text().splitlines()) + 1
    return starts


def tracer() -> Callable[..., Any]:
    """Returns a tracer, which sets the bytes of all lines that a process reaches. It stays in use in processes that are
    forked."""
    starts = starts_of(Path(os.environ["IBP_TRACED_TREE"]))
    with open(os.environ["IBP_REACHED"], "r+b") as file:
        reached = mmap.mmap(file.fileno(), TRACED_BYTES)

    def tracer_of(start):
        def line(frame, event, argument):
            if event == "line":
                reached[start + frame.f_lineno] = 1
            return line

        return line

    tracers = {path: tracer_of(start) for path, start in starts.items()}

    def call(frame, event, argument):
        return tracers.get(frame.f_code.co_filename)

    return call


def use(tracer: Callable[..., Any]) -> None:
    threading.settrace(tracer)
    sys.settrace(tracer)
