"""Which public calls meet which resources of the system or of the caller, and the tests of each meeting.

The calls are found by their parameters, so that a new call without a row fails here. A meeting that has no test stands
under UNTESTED with the reason.
"""

import argparse
import ast
import inspect
import re

import pytest

from ibp._cli.main import make_parser
from named_tests import is_test
from native import ROOT
from public_names import public_functions

READ = ("no file, read", "a link, read", "a directory, read", "a limit of descriptors", "a mapped file that is cut")
WRITTEN = (
    "no file, written",
    "a symbolic or hard link, written",
    "a directory, written",
    "a file that another call writes",
    "a temporary file at a kill",
    "a temporary file at Ctrl-C",
)
HELD, MESSAGE = "a lock that is held at a fork", "a message whose memory is used again"
SHARED, PAGE, PINNED = "shared memory that can be cut", "a page number when a call raises", "memory that is not pinned"
MEETS = {  # by "call(parameter: annotation)", besides paths
    r"\(messages?:": MESSAGE,
    r": SharedHandle\b": SHARED,
    r"\.kv\.\w+\.\w+\((moves|pages|tokens|keys?): (?!torch)": PAGE,
    r"\((overflow_)?memory:|\.(pin_memory_?|share_memory_)\(": PINNED,
}
LOCKS = {  # the public call that holds a lock, by the file that makes it
    "ibp/_activations/offload.py": "ibp.offload_activations",
    "ibp/_fetch/host_gather.py": "ibp.index_select",
    "ibp/_machine/segments.py": "ibp.CompressedTensor.share_memory_",
    "ibp/_offload/events.py": "ibp.offload",
    "ibp/adapters.py": "ibp.adapters.ModelLoading",
    "ibp/cache/_slabs.py": "ibp.RowCache",
    "ibp/checkpoints/_other_files.py": "ibp.checkpoints.compress",
    "ibp/checkpoints/_source.py": "ibp.checkpoints.compress",
    "ibp/checkpoints/_writing.py": "ibp.checkpoints.CheckpointWriter",
    "ibp/codecs/_codec.py": "ibp.codecs.WholeTensor.decompress",
    "ibp/kv/_engines.py": "ibp.kv.KeyedPages",
    "ibp/kv/_store.py": "ibp.kv.KVStore",
}

# {resource: {test: calls}}; a call has a comma and a space behind it, since names of commands have a space in them.
PATHS = "tests/files/test_paths.py::"
READERS = (
    "ibp.load, ibp.open, ibp.offload, ibp.checkpoints.compress, ibp.checkpoints.decompress, ibp.checkpoints.estimate, "
    "ibp.checkpoints.open, ibp apply, ibp compress, ibp decompress, ibp diff, ibp estimate, ibp inspect, ibp verify"
)
WRITERS = (
    "ibp.save, ibp.checkpoints.CheckpointWriter, ibp.checkpoints.compress, ibp.checkpoints.decompress, ibp apply, "
    "ibp compress, ibp decompress, ibp diff"
)
PAGES = f"{WRITERS}, ibp inspect"
TESTED = {
    "no file, read": {PATHS + "test_only_regular_files_are_read": READERS},
    "a link, read": {PATHS + "test_links_to_a_file_are_read": READERS, PATHS + "test_links_that_lead_nowhere": READERS},
    "a directory, read": {PATHS + "test_a_directory_without_files": READERS},
    "a limit of descriptors": {PATHS + "test_files_of_more_tensors_than_descriptors": READERS},
    "a mapped file that is cut": {
        "tests/files/test_opened_files.py::test_a_file_that_was_cut_after_it_was_opened": "ibp.open"
    },
    "no file, written": {PATHS + "test_only_regular_files_are_replaced": PAGES},
    "a symbolic or hard link, written": {PATHS + "test_links_are_replaced_and_not_followed": PAGES},
    "a directory, written": {
        PATHS + "test_a_directory_gets_a_file": WRITERS,
        PATHS + "test_a_page_does_not_replace_a_directory": "ibp inspect",
    },
    "a file that another call writes": {PATHS + "test_a_file_that_another_call_writes": PAGES},
    "a temporary file at a kill": {PATHS + "test_the_next_call_removes_what_a_killed_one_left": PAGES},
    "a temporary file at Ctrl-C": {PATHS + "test_an_interrupt_leaves_no_temporary_file": PAGES},
    HELD: {
        "tests/tables/test_many_users.py::test_a_process_forks_while_a_thread_holds_a_lock": "ibp.RowCache, "
        "ibp.kv.KeyedPages, ibp.kv.KVStore, ibp.offload, ibp.offload_activations, ibp.index_select",
    },
    MESSAGE: {
        "tests/deltas/test_delta_messages.py::test_a_buffer_that_is_used_for_each_message": "ibp.deltas.Receiver.apply",
        "tests/kv/test_packed_pages.py::test_a_buffer_that_is_used_for_each_message": "ibp.kv.unpack",
    },
    SHARED: {
        "tests/distributed/test_sharing.py::test_memory_that_can_be_cut_is_refused": "ibp.distributed.open_shared"
    },
    PAGE: {
        "tests/kv/test_keyed_pages.py::test_a_call_that_raises_loses_no_room": "ibp.kv.KeyedPages.put",
        "tests/kv/test_keyed_pages.py::test_an_interrupt_at_any_moment_loses_no_room": (
            "ibp.kv.KeyedPages.get, ibp.kv.KeyedPages.delete"
        ),
        "tests/kv/test_kv_store.py::test_interrupted_calls_lose_no_page": "ibp.kv.KVStore.store, ibp.kv.KVStore.free",
        "tests/kv/test_kv_rows.py::test_interrupted_stores_lose_no_token": "ibp.kv.KVRows.store",
        "tests/kv/test_block_store.py::test_interrupted_jobs_lose_no_page": "ibp.kv.BlockStore.store",
    },
    PINNED: {
        "tests/machine/test_pinning.py::test_a_table_is_pageable": "ibp.compress, ibp.CompressedTensor.pin_memory",
        "tests/machine/test_pinning.py::test_tables_of_files_are_pageable": "ibp.load, ibp.open, ibp.File",
        "tests/machine/test_pinning.py::test_copies_of_a_sender_are_pageable": "ibp.deltas.Sender",
        "tests/machine/test_pinning.py::test_shared_memory_that_is_not_pinned": "ibp.CompressedTensor.share_memory_, "
        "ibp.distributed.open_shared",
        "tests/activations/test_activations.py::test_pieces_stay_from_where_no_memory_is_pinned": (
            "ibp.offload_activations"
        ),
    },
}
SAVES_MODEL, SENDS = "ibp.integrations.transformers.save_coded", "ibp.integrations.vllm.sync.send"
UNTESTED = {  # {resource: {reason: calls}}
    **{
        resource: {
            "transformers makes the directory, and `ibp.save` writes the file": SAVES_MODEL,
            "the folder that is given gets a temporary directory with files of new names": SENDS,
        }
        for resource in WRITTEN
    },
    **{
        resource: {
            "tells files of ibp from others, and has a test of its own, tests/checkpoints/test_writing.py": (
                "ibp.checkpoints.is_coded"
            ),
        }
        for resource in READ
    },
    "a mapped file that is cut": {
        "reads the header of a file, and maps none": "ibp.checkpoints.is_coded",
        "a cut while the call has the file mapped ends the process, as SECURITY.md says": READERS.replace(
            "ibp.open, ", ""
        ),
    },
    HELD: {
        "held while memory is pinned, a deflated array is read, a weight is decoded or a function makes a tensor; "
        "tests/common/test_locks.py tests the class of all locks": "ibp.CompressedTensor.share_memory_, "
        "ibp.checkpoints.compress, ibp.adapters.ModelLoading, ibp.checkpoints.CheckpointWriter",
        "needs a GPU, which no child can use": "ibp.codecs.WholeTensor.decompress",
    },
    MESSAGE: {
        "by `ibp.deltas.Receiver.apply`, which has a test": "ibp.integrations.vllm.sync.ModelReceiver.apply",
        "copies messages to files, or broadcasts them in the order of the stream": SENDS,
    },
    PAGE: {
        "gives no number away and takes none": "ibp.kv.KeyedPages.touch, ibp.kv.KeyedPages.pin, "
        "ibp.kv.KeyedPages.unpin, ibp.kv.KeyedPages.leading, ibp.kv.KeyedPages.restorable, ibp.kv.KVStore.is_stored",
        "reads only": "ibp.kv.KVStore.load, ibp.kv.KVRows.load, ibp.kv.BlockStore.load",
    },
    PINNED: {
        "memory is pinned for a GPU only, and no test refuses it there": "ibp.CodedRows, ibp.kv.KVRows, "
        "ibp.kv.KVStore, ibp.kv.TokenCoder, ibp.codecs.WholeTensor.pin_memory, ibp.spill.place, "
        "ibp.integrations.transformers.CompressedCache",
        "pins by `ibp.compress`, which has a test": "ibp.distributed.ShardedTable.from_local",
        "pins by `CompressedTensor.pin_memory` or `open_shared`, which have tests": "ibp.distributed.share_table, "
        "ibp.integrations.graphbolt.Feature.pin_memory_",
        "pins nothing": "ibp.RowCache.pin_memory",
    },
}


def of_package():
    for name, function in public_functions():
        for parameter in inspect.signature(function).parameters.values():
            yield name.removesuffix(".__init__"), parameter.name, str(parameter.annotation)


def of_integrations():
    """From the sources, since modules import their frameworks."""
    folder = ROOT / "ibp" / "integrations"
    trees = {path.relative_to(folder): ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    defined = {node.name: node for tree in trees.values() for node in tree.body if hasattr(node, "name")}
    named = {
        path: ast.literal_eval(node.value)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"
    }
    packages = {path.parent: set(names) for path, names in named.items() if path.stem == "__init__"}
    for path, names in named.items():
        for name in names if path.stem != "__init__" else ():
            of_package = name in packages.get(path.parent, ())
            module = ".".join((path.parent if of_package else path.with_suffix("")).parts)
            node, called = defined[name], f"ibp.integrations.{module}.{name}"
            methods = (
                [(called, node)]
                if isinstance(node, ast.FunctionDef)
                else [
                    (called if method.name == "__init__" else f"{called}.{method.name}", method)
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or method.name[0] != "_")
                ]
            )
            for full, method in methods:
                of = method.args
                for argument in (*of.posonlyargs, *of.args, *of.kwonlyargs):
                    yield full, argument.arg, ast.unparse(argument.annotation) if argument.annotation else ""


def of_commands():
    """Their positional arguments are inputs, and options with a file for a value are outputs."""
    (commands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for command, parser in commands.choices.items():
        for action in parser._actions:
            if not action.option_strings:
                yield f"ibp {command}", action.dest, "PathLike"
            elif re.match(r"OUT|DELTA|FILE|DIR", str(action.metavar)):
                yield f"ibp {command}", "output", "PathLike"


def resources_of(call, parameter, annotation):
    """What a call meets by one of its parameters."""
    if re.search(r"\b(PathLike|Checkpoint)\b", annotation) or parameter == "folder":
        yield from WRITTEN if parameter in ("output", "folder") or ".save" in call else READ
    for pattern, resource in MEETS.items():
        if re.search(pattern, f"{call}({parameter}: {annotation}"):
            yield resource


def meetings():
    """The (resource, call) that parameters and locks tell of."""
    parameters = [*of_package(), *of_integrations(), *of_commands()]
    found = {(resource, parameter[0]) for parameter in parameters for resource in resources_of(*parameter)}
    return found | {(HELD, call) for call in LOCKS.values()}


def rows_of(table):
    return {
        (resource, call) for resource, rows in table.items() for calls in rows.values() for call in calls.split(", ")
    }


def test_each_meeting_has_a_test_or_a_reason():
    tested, untested = rows_of(TESTED), rows_of(UNTESTED)
    assert sorted(meetings() - tested - untested) == [], "calls without a row"
    assert sorted((tested | untested) - meetings()) == [], "rows without a call"
    assert sorted(tested & untested) == []


@pytest.mark.parametrize("resource", TESTED)
def test_tests_are_there(resource):
    assert [test for test in TESTED[resource] if not is_test(test)] == []


def test_each_lock_has_a_call():
    assert {
        str(path.relative_to(ROOT)) for path in (ROOT / "ibp").rglob("*.py") if "ForkLock()" in path.read_text()
    } == LOCKS.keys()


@pytest.mark.parametrize(
    "parameter, wanted",
    [
        (("ibp.new", "path", "PathLike"), set(READ)),
        (("ibp.new", "checkpoint", "Checkpoint | None"), set(READ)),
        (("ibp.new", "delta", "CheckpointDelta"), set()),
        (("ibp.new", "output", "PathLike"), set(WRITTEN)),
        (("ibp.save_new", "path", "PathLike"), set(WRITTEN)),
        (("ibp.new", "message", "torch.Tensor"), {MESSAGE}),
        (("ibp.kv.New.put", "pages", "Pages"), {PAGE}),
        (("ibp.New", "memory", "str | None"), {PINNED}),
        (("ibp.new", "path", "str | None"), set()),
    ],
)
def test_what_parameters_tell(parameter, wanted):
    assert set(resources_of(*parameter)) == wanted
