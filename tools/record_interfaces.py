"""Records the interfaces that releases of serving engines offer to ibp's adapters: classes, and how engines call
adapters.

    python tools/record_interfaces.py vllm==0.33.0 sglang==0.5.23    downloads the wheels with pip, and deletes them
    python tools/record_interfaces.py path/to/some.whl               reads a local wheel

For each release this writes tests/integrations/interfaces/PACKAGE-VERSION.json, and unpacks the Python files (6 to 40
MB) to build/engines/PACKAGE-VERSION. Files are parsed and not imported, so that neither the package nor a GPU is
needed.

tests/integrations/test_serving_interfaces.py compares the adapters, and the stand-ins in tests/integrations/stubs, with
the JSON files. If a release differs in something that an adapter uses, the test fails and its message says what has
changed. tests/integrations/test_serving_releases.py runs the adapters with the unpacked files, if there are any.

A file has two parts. `classes` has for each class the file that defines it, its base classes, the fields of dataclasses
and members of enums with their defaults, the parameters of public methods, which methods are abstract or properties,
and the attributes that are set. `uses` has for each role (an adapter's class, as the engine holds it) the forms in
which each method is called, and the attributes that are read. The form "3, expedited" means three arguments by position
and one by keyword. Only names and defaults are recorded.
"""

import argparse
import ast
import fnmatch
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
INTERFACES = ROOT / "tests" / "integrations" / "interfaces"
ENGINES = ROOT / "build" / "engines"
# LMCache's Bitmap is the only compiled module that is unpacked, because it needs no other one.
KEPT = ("*.py", "lmcache/lmcache_native.*.so")
# These methods are recorded although their names begin with an underscore: they make objects, or an adapter calls them.
KEPT_METHODS = ("__init__", "__new__", "_notify_keys_stored", "_notify_keys_accessed", "_notify_keys_deleted") + (
    "_get_weights_iterator",
    "_prepare_weights",
)


class Role(NamedTuple):
    """An object of ibp that an engine holds. files: the engine's files that use it. receivers: the expressions in these
    files that are the object. maker: the file that makes the object, and the expression that is called."""

    files: tuple[str, ...]
    receivers: tuple[str, ...]
    maker: tuple[str, str] | None = None


class Package(NamedTuple):
    """The classes and roles to record of a package. classes: by name, the files that may define it; the first file that
    exists counts. roles: by name."""

    classes: dict[str, tuple[str, ...]]
    roles: dict[str, Role]


def _in_file(path, *names):
    return {name: (path,) for name in names}


_OFFLOADING = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/"
_LAYERS = "vllm/model_executor/layers/"
_MOE = _LAYERS + "fused_moe/"
_LOADER = "vllm/model_executor/model_loader/"
_TRANSFER = "vllm/distributed/weight_transfer/"
_HICACHE = "sglang/srt/mem_cache/hicache_storage.py"
_L2 = "lmcache/v1/distributed/l2_adapters/"
_HOST_POOLS = ("sglang/srt/mem_cache/pool_host/base.py", "sglang/srt/mem_cache/memory_pool_host.py")

PACKAGES = {
    "vllm": Package(
        _in_file(
            "vllm/v1/kv_offload/base.py",
            "BlockIDsLoadStoreSpec",
            "CanonicalKVCacheRef",
            "CanonicalKVCacheTensor",
            "CanonicalKVCaches",
            "GPULoadStoreSpec",
            "LoadStoreSpec",
            "OffloadingManager",
            "OffloadingSpec",
            "OffloadingWorker",
            "PrepareStoreOutput",
            "RequestOffloadingContext",
            "TransferResult",
        )
        | _in_file(
            "vllm/v1/kv_offload/config.py",
            "OffloadingCacheConfig",
            "OffloadingConfig",
            "OffloadingGroupConfig",
            "OffloadingModelConfig",
            "OffloadingParallelConfig",
        )
        | _in_file("vllm/v1/kv_offload/tiering/base.py", "JobResult", "SecondaryTierManager", "TransferJob")
        | _in_file("vllm/v1/kv_offload/cpu/manager.py", "CPUOffloadingManager")
        | _in_file("vllm/v1/kv_offload/cpu/spec.py", "CPUOffloadingSpec")
        | _in_file(_LAYERS + "quantization/base_config.py", "QuantizationConfig", "QuantizeMethodBase")
        | _in_file(_LAYERS + "linear.py", "LinearMethodBase", "UnquantizedLinearMethod")
        | _in_file(_LAYERS + "vocab_parallel_embedding.py", "UnquantizedEmbeddingMethod")
        | _in_file(_MOE + "fused_moe_method_base.py", "FusedMoEMethodBase")
        | _in_file(_MOE + "unquantized_fused_moe_method.py", "UnquantizedFusedMoEMethod")
        | _in_file(_MOE + "routed_experts.py", "RoutedExperts")
        | _in_file(_MOE + "modular_kernel.py", "FusedMoEExpertsModular", "FusedMoEKernel")
        | _in_file(_MOE + "oracle/unquantized.py", "UnquantizedMoeBackend")
        | _in_file(_MOE + "config.py", "FusedMoEConfig", "FusedMoEParallelConfig")
        | _in_file(_LOADER + "default_loader.py", "DefaultModelLoader")
        | _in_file(_TRANSFER + "base.py", "WeightTransferEngine")
        | _in_file(_TRANSFER + "factory.py", "WeightTransferEngineFactory"),
        {
            "worker": Role((_OFFLOADING + "worker.py",), ("self.worker",)),
            "tiering": Role(
                tuple("vllm/v1/kv_offload/tiering/" + name for name in ("manager.py", "spec.py")),
                ("tier", "tier_cls", "self.secondary_tiers[tier_idx]"),
                ("vllm/v1/kv_offload/tiering/factory.py", "tier_cls"),
            ),
            "weights": Role(
                (_LAYERS + "linear.py", _LAYERS + "vocab_parallel_embedding.py", "vllm/lora/layers/*.py"),
                ("self.quant_method", "quant_method", "self._get_quant_method()", "layer._get_quant_method()"),
            ),
            "experts": Role(
                tuple(_MOE + name for name in ("routed_experts.py", "runner/moe_runner.py")),
                ("self.quant_method", "self._quant_method", "self.routed_experts.quant_method", "quant_method"),
            ),
            "sync": Role(
                ("vllm/v1/worker/gpu_worker.py",),
                ("self.weight_transfer_engine", "weight_transfer_engine", "engine"),
                (_TRANSFER + "factory.py", "engine_cls"),
            ),
            "quantization": Role(("vllm/config/vllm.py", _LOADER + "weight_utils.py"), ("quant_config", "quant_cls")),
            "spec": Role(
                tuple(_OFFLOADING + name for name in ("worker.py", "scheduler.py", "metrics.py")),
                ("spec", "self.spec", "spec_cls", "self._spec_cls"),
                ("vllm/v1/kv_offload/factory.py", "spec_cls"),
            ),
        },
    ),
    "sglang": Package(
        _in_file(
            _HICACHE,
            "HiCacheStorage",
            "HiCacheStorageConfig",
            "PoolHitPolicy",
            "PoolName",
            "PoolTransfer",
            "PoolTransferResult",
        )
        | {"HostKVCache": _HOST_POOLS, "MHATokenToKVPoolHost": ("sglang/srt/mem_cache/pool_host/mha.py", *_HOST_POOLS)}
        | {"StorageMetrics": ("sglang/srt/observability/metrics_collector.py",)},
        {
            "storage": Role(
                (
                    "sglang/srt/managers/cache_controller.py",
                    "sglang/srt/mem_cache/*.py",
                    "sglang/srt/mem_cache/hybrid_cache/*.py",
                    "sglang/srt/mem_cache/unified_cache/*.py",
                ),
                ("self.storage_backend", "self.cache_controller.storage_backend", "self._backend"),
                ("sglang/srt/mem_cache/storage/backend_factory.py", "backend_class"),
            ),
            "pool": Role(("sglang/srt/mem_cache/l2_transfer.py",), ("transfer.host_pool",)),
        },
    ),
    "lmcache": Package(
        _in_file(_L2 + "base.py", "L2AdapterInterface")
        | _in_file("lmcache/v1/distributed/internal_api.py", "L2StoreResult")
        | _in_file("lmcache/v1/memory_management.py", "MemoryObj")
        | _in_file("lmcache/v1/platform/event_notifier.py", "EventNotifier"),
        {
            "tier": Role(
                ("lmcache/v1/distributed/storage_controllers/*.py", "lmcache/v1/distributed/storage_manager.py"),
                (
                    "adapter",
                    "op.adapter",
                    "state.adapter",
                    "self._l2_adapters[l2_idx]",
                    "self._l2_adapters[adapter_idx]",
                ),
                (_L2 + "plugin_l2_adapter.py", "adapter_cls"),
            )
        },
    ),
}


# ---- what a file says ----


def _parameters(function):
    """Returns parameters as they are written, without annotations: "self, job_id, expedited=False"."""
    args = function.args
    for arg in ast.walk(args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    return ast.unparse(args)


def signature_of(parameters):
    """Returns the inspect.Signature of recorded parameters. Defaults are text."""
    args = ast.parse(f"def method({parameters}): pass").body[0].args
    positional = [(arg, inspect.Parameter.POSITIONAL_ONLY) for arg in args.posonlyargs]
    positional += [(arg, inspect.Parameter.POSITIONAL_OR_KEYWORD) for arg in args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    found = [(arg, kind, default) for (arg, kind), default in zip(positional, defaults)]
    found += [(args.vararg, inspect.Parameter.VAR_POSITIONAL, None)] if args.vararg else []
    found += [(arg, inspect.Parameter.KEYWORD_ONLY, value) for arg, value in zip(args.kwonlyargs, args.kw_defaults)]
    found += [(args.kwarg, inspect.Parameter.VAR_KEYWORD, None)] if args.kwarg else []
    return inspect.Signature(
        [
            inspect.Parameter(arg.arg, kind, default=inspect.Parameter.empty if value is None else ast.unparse(value))
            for arg, kind, value in found
        ]
    )


def _decorators(node):
    return [
        ast.unparse(each.func if isinstance(each, ast.Call) else each).split(".")[-1] for each in node.decorator_list
    ]


def _attributes(node):
    """Returns the names that methods of a class set on self."""
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return sorted({each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"})


def class_of(node, path):
    """Returns the record of a class. node: its ast.ClassDef."""
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    functions = [each for each in functions if each.name in KEPT_METHODS or not each.name.startswith("_")]
    bases = [ast.unparse(base) for base in node.bases]
    is_dataclass = "dataclass" in _decorators(node)
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)] if is_dataclass else []
    members = [each for each in node.body if isinstance(each, ast.Assign)] if "Enum" in bases else []
    found = {
        "file": path,
        "bases": bases,
        "fields": {each.target.id: None if each.value is None else ast.unparse(each.value) for each in fields},
        "members": {each.targets[0].id: ast.unparse(each.value) for each in members},
        "methods": {each.name: _parameters(each) for each in functions},
        "abstract": [each.name for each in functions if "abstractmethod" in _decorators(each)],
        "properties": [each.name for each in functions if "property" in _decorators(each)],
        "attributes": _attributes(node),
    }
    return {name: value for name, value in found.items() if value}


def _form(call):
    """Returns how a call passes its arguments: "2, expedited" means two by position and one by keyword."""
    positional = "*" if any(isinstance(arg, ast.Starred) for arg in call.args) else str(len(call.args))
    return ", ".join([positional, *sorted(keyword.arg or "**" for keyword in call.keywords)])


def calls_of(tree, function):
    """Returns the forms in which a tree calls a function. function: as it is written, such as "TransferResult" or
    "self.worker.wait"."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {_form(node) for node in calls if ast.unparse(node.func) == function}


def uses_of(trees, receivers):
    """Returns how trees use the objects that the receivers are: the forms in which each method is called, and the
    attributes that are read."""
    calls, attributes = {}, set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in receivers:
            attributes.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func.value) in receivers:
                calls.setdefault(node.func.attr, set()).add(_form(node))
    return {
        "calls": {name: sorted(forms) for name, forms in sorted(calls.items())},
        "attributes": sorted(attributes - set(calls)),
    }


# ---- what a release says ----


def interface_of(package, read, names):
    """Returns the record of a package. read: returns the text of a file. names: of all files."""
    wanted = PACKAGES[package]
    trees = {}

    def tree_of(path):
        if path not in trees:
            trees[path] = ast.parse(read(path))
        return trees[path]

    classes = {}
    for name, paths in sorted(wanted.classes.items()):
        for path in paths:
            nodes = tree_of(path).body if path in names else ()
            node = next((each for each in nodes if isinstance(each, ast.ClassDef) and each.name == name), None)
            if node is not None:
                classes[name] = class_of(node, path)
                break
    uses = {}
    for name, role in sorted(wanted.roles.items()):
        paths = sorted(path for path in names if any(fnmatch.fnmatchcase(path, each) for each in role.files))
        uses[name] = uses_of([tree_of(path) for path in paths], role.receivers)
        if role.maker and role.maker[0] in names:
            file, function = role.maker
            uses[name]["calls"]["__init__"] = sorted(calls_of(tree_of(file), function))
    return {"classes": classes, "uses": uses}


def record(release):
    """Returns the record of an unpacked release. release: a folder PACKAGE-VERSION."""
    package, version = release.name.split("-")
    names = {path.relative_to(release).as_posix() for path in release.rglob("*.py")}
    return {"package": package, "version": version, **interface_of(package, lambda path: _text(release / path), names)}


def _text(path):
    return path.read_text(encoding="utf-8")


def unpack(wheel, folder):
    """Unpacks a wheel's Python files. Returns their folder, PACKAGE-VERSION."""
    package, version = Path(wheel).name.split("-")[:2]
    if package not in PACKAGES:
        raise SystemExit(f"{wheel} is of {package}; wanted one of {', '.join(PACKAGES)}")
    release = Path(folder) / f"{package}-{version}"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if any(fnmatch.fnmatchcase(name, kept) for kept in KEPT)]
        archive.extractall(release, [name for name in names if name.startswith(f"{package}/")])
    return release


def changes(before, after, at=""):
    """Yields sentences that say how two records, or parts of them, differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            name = f"{at}.{key}" if at else key
            if key not in after:
                yield f"{name} is gone"
            elif key not in before:
                yield f"{name} is new: {json.dumps(after[key])}"
            else:
                yield from changes(before[key], after[key], name)
    elif isinstance(before, list) and isinstance(after, list):
        yield from (f"{at} lacks {each}" for each in before if each not in after)
        yield from (f"{at} has {each} now" for each in after if each not in before)
    elif before != after:
        yield f"{at} was {json.dumps(before)}, is {json.dumps(after)}"


def numbers(interface):
    """Returns the version as numbers, by which the records of a package are ordered."""
    return [int(number) for number in re.findall(r"\d+", interface["version"])]


def since(interface):
    """Returns sentences that say what a release has changed since the recorded release before it."""
    written = [json.loads(_text(path)) for path in INTERFACES.glob(f"{interface['package']}-*.json")]
    earlier = [each for each in sorted(written, key=numbers) if numbers(each) < numbers(interface)]
    return [
        f"since {each['version']}: {line}"
        for each in earlier[-1:]
        for line in changes(each | {"version": interface["version"]}, interface)
    ]


def wheel_of(release, folder):
    """Returns the path of a release's wheel, and downloads it to a folder unless it is a local file."""
    if release.endswith(".whl"):
        return release
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet"]
    subprocess.run([*pip, "--dest", folder, release], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def write(interface, folder):
    path = folder / f"{interface['package']}-{interface['version']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(interface, indent=1) + "\n")
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="WHEEL|PACKAGE==VERSION")
    parser.add_argument("--out", type=Path, default=INTERFACES, help="folder of the JSON files")
    parser.add_argument("--unpack", type=Path, default=ENGINES, help="folder of the Python files")
    options = parser.parse_args()
    for release in options.releases:
        with tempfile.TemporaryDirectory() as folder:
            unpacked = unpack(wheel_of(release, folder), options.unpack)
        print(unpacked, write(record(unpacked), options.out))


if __name__ == "__main__":
    main()
