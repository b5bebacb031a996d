"""The serving adapters and the stand-ins in stubs/, held to the interfaces in interfaces/, which
tools/record_interfaces.py wrote down from releases.
"""

import ast
import copy
import importlib
import inspect
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ibp.integrations import shared
from ibp.integrations.vllm import sync, weights
from native import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import record_interfaces  # noqa: E402

STUBS = Path(__file__).parent / "stubs"
INTERFACES = [json.loads(path.read_text()) for path in (Path(__file__).parent / "interfaces").glob("*.json")]
# What the adapter's classes derive from, in the order in which Python looks.
BASES = {
    "IBPOffloadingSpec": ("CPUOffloadingSpec", "OffloadingSpec"),
    "IBPOffloadingWorker": ("OffloadingWorker",),
    "IBPSecondaryTier": ("SecondaryTierManager",),
    "IBPHiCacheStorage": ("HiCacheStorage",),
    "IBPHostPool": ("MHATokenToKVPoolHost", "HostKVCache"),
    "IBPL2Adapter": ("L2AdapterInterface",),
    "IBPConfig": ("QuantizationConfig",),
    "IBPWeightMethod": ("UnquantizedEmbeddingMethod", "LinearMethodBase", "QuantizeMethodBase"),
    "IBPExpertsMethod": ("FusedMoEMethodBase", "QuantizeMethodBase"),
    "IBPModelLoader": ("DefaultModelLoader",),
    "IBPWeightTransferEngine": ("WeightTransferEngine",),
}
ROLES = {"spec": "IBPOffloadingSpec", "worker": "IBPOffloadingWorker", "storage": "IBPHiCacheStorage"} | {
    "pool": "IBPHostPool",
    "tier": "IBPL2Adapter",
    "tiering": "IBPSecondaryTier",
    "weights": "IBPWeightMethod",
    "experts": "IBPExpertsMethod",
    "quantization": "IBPConfig",
    "sync": "IBPWeightTransferEngine",
}
OF_WEIGHTS = ("IBPConfig", "IBPWeightMethod", "IBPExpertsMethod", "IBPModelLoader", "IBPWeightTransferEngine")
# What the adapters' variables are of the engine's classes.
VARIABLES = {
    "vllm": {
        "config": "OffloadingConfig",
        "self.config": "OffloadingConfig",
        "config.parallel": "OffloadingParallelConfig",
        "self.config.cache": "OffloadingCacheConfig",
        "self.config.model": "OffloadingModelConfig",
        "kv_caches": "CanonicalKVCaches",
        "kv_caches.tensors[number]": "CanonicalKVCacheTensor",
        "ref": "CanonicalKVCacheRef",
        "gpu": "GPULoadStoreSpec",
        "chunks": "BlockIDsLoadStoreSpec",
    },
    "sglang": {"storage_config": "HiCacheStorageConfig", "transfer": "PoolTransfer", "host": "HostKVCache"},
    "lmcache": {
        "memory": "MemoryObj",
        "each": "EventNotifier",
        "notifier": "EventNotifier",
        "self._notifiers[0]": "EventNotifier",
    },
}
# The same of the parts of weights.py that see experts, where these are recorded.
READS_EXPERTS = "CodedMethod", "IBPExpertsMethod", "why_plain_experts", "_with"
OF_EXPERTS = {
    "layer": "RoutedExperts",
    "plain": "UnquantizedFusedMoEMethod",
    "self._plain": "UnquantizedFusedMoEMethod",
    "self.moe_kernel": "FusedMoEKernel",
    "self.moe_kernel.fused_experts": "FusedMoEExpertsModular",
    "moe": "FusedMoEConfig",
    "moe.moe_parallel_config": "FusedMoEParallelConfig",
}
# What the adapters make of the engine's classes.
MADE = {
    "vllm": {"TransferResult": "TransferResult", "super().__init__": "CPUOffloadingSpec"},
    "sglang": {"PoolTransferResult": "PoolTransferResult"},
    "lmcache": {"L2StoreResult": "L2StoreResult", "super().__init__": "L2AdapterInterface"},
}
# Not in all releases: the adapters ask for BLOCK_GROUPS before they look at the sizes of its groups.
SOME_RELEASES_ONLY = {"block_pages", "group_pages"}
# Engines ask for these after they have looked whether an object has them, or is of a class of theirs.
NOT_OURS = {
    "old_quant_method",
    "reconfigure",
    "reconfigure_status",
    "from_config_file",
    "from_config_dict_json",
    "requantization_source",
}
NOTIFIES = {
    "_notify_keys_stored": "keys, sizes",
    "_notify_keys_accessed": "keys",
    "_notify_keys_deleted": "keys, sizes",
}
# Stand-ins of the tests themselves: see HostPool and Memory in test_serving_adapters.py.
STAND_INS = {"HostPool": ("sglang", "HostKVCache"), "Memory": ("lmcache", "MemoryObj")}


INTERFACES.sort(key=lambda interface: (interface["package"], record_interfaces.numbers(interface)))
NEWEST = {interface["package"]: interface for interface in INTERFACES}


@pytest.fixture(scope="module")
def tool():
    return record_interfaces


@pytest.fixture
def adapter_of(monkeypatch):
    """Imports an adapter with the stand-ins, which nobody else sees."""

    def imported(package):
        monkeypatch.syspath_prepend(str(STUBS))
        names = {"vllm": ("vllm.tiers", "vllm.offloading"), "sglang": ("sglang.pool", "sglang.storage")}.get(
            package, (package,)
        )
        return [importlib.reload(importlib.import_module(f"ibp.integrations.{name}")) for name in names][-1]

    before = set(sys.modules)
    yield imported
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("vllm", "sglang", "lmcache") or name.startswith("ibp.integrations."):
            del sys.modules[name]


# ---- the checks: each gives sentences of what does not fit ----


def of_class(interface, names, what):
    """A part of what is kept of a class and those that it derives from: the first that has it counts."""
    merged = {}
    for name in reversed(names):
        found = interface["classes"].get(name, {}).get(what, {})
        merged.update(found if isinstance(found, dict) else dict.fromkeys(found))
    return merged


def class_named(adapter, name):
    """A class of an adapter; vLLM has four adapters, SGLang two."""
    others = (importlib.import_module(f"ibp.integrations.{each}") for each in ("vllm.tiers", "sglang.pool"))
    return next(getattr(each, name) for each in (adapter, weights, sync, *others) if hasattr(each, name))


def signature_of(tool, interface, name):
    """Of making an object of a class, without self."""
    record = interface["classes"][name]
    if "fields" not in record:
        methods = record["methods"]
        return without_self(tool.signature_of(methods.get("__init__") or methods["__new__"]))
    return tool.signature_of(
        ", ".join(field if default is None else f"{field}={default}" for field, default in record["fields"].items())
    )


def members_of(ours):
    """The members of a class that it has of itself or of another class of ours."""
    found = {}
    for kind in reversed([each for each in ours.__mro__ if each.__module__.startswith("ibp.")]):
        found |= vars(kind)
    return found


def takes(signature, form):
    """Whether a signature takes a call such as "3, expedited"."""
    positional, *keywords = form.split(", ")
    if positional == "*" or "**" in keywords:
        return True  # what it passes is not known
    try:
        signature.bind(*[None] * int(positional), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def whole_signature_of(ours, name):
    """Of a method of a class, with self or cls."""
    member = members_of(ours)[name]
    return inspect.signature(getattr(member, "__func__", member))


def without_self(signature):
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def wrong_calls_of_ours(tool, interface, adapter):
    """Calls of the engine that an adapter's class does not take, attributes that it does not have."""
    for role, uses in interface["uses"].items():
        ours = class_named(adapter, ROLES[role])
        bases = BASES[ROLES[role]]
        methods, attributes = (of_class(interface, bases, what) for what in ("methods", "attributes"))
        for name, forms in uses["calls"].items():
            if name in NOT_OURS:
                continue
            if name in members_of(ours):
                signature = without_self(whole_signature_of(ours, name))
            elif name in methods:
                signature = without_self(tool.signature_of(methods[name]))
            else:
                yield f"{role} has no {name}"
                continue
            yield from (f"{role}.{name} does not take {form}" for form in forms if not takes(signature, form))
        known = set(attributes) | set(methods)
        unknown = (name for name in uses["attributes"] if name not in known | NOT_OURS and not hasattr(ours, name))
        yield from (f"{role} has no attribute {name}" for name in unknown)


def wrong_methods_of_ours(tool, interface, adapter):
    """Abstract methods that an adapter's class lacks, methods whose parameters have other names than the engine's."""
    for name, bases in BASES.items():
        if bases[0] not in interface["classes"]:
            continue
        ours, methods = class_named(adapter, name), of_class(interface, bases, "methods")
        concrete = set(members_of(ours)) | set(of_class(interface, bases[:-1], "methods"))
        missing = set(of_class(interface, bases[-1:], "abstract")) - concrete
        yield from (f"{name} has no {each}" for each in sorted(missing))
        for each in (set(methods) & set(members_of(ours))) - {"__init__"}:
            theirs, mine = tool.signature_of(methods[each]), whole_signature_of(ours, each)
            if mine.parameters.keys() >= {"sizes", "options"}:
                continue  # passed on as they are
            count = len(theirs.parameters)
            if [*theirs.parameters] != [*mine.parameters][:count] or not takes(mine, str(count)):
                yield f"{name}.{each} is {mine}; the engine's is {theirs}"


def wrong_calls_of_theirs(tool, interface, source):
    """What an adapter does with the engine's classes that these do not have or take."""
    package, tree = interface["package"], ast.parse(source)
    for function, name in MADE[package].items():
        signature = signature_of(tool, interface, name)
        yield from (
            f"{name} does not take {form}" for form in tool.calls_of(tree, function) if not takes(signature, form)
        )
    yield from wrong_uses(tool, interface, tree, VARIABLES[package])
    if "experts" in interface["uses"]:
        nodes = {getattr(node, "name", ""): node for node in ast.parse(Path(weights.__file__).read_text()).body}
        of_experts = ast.Module([nodes[name] for name in READS_EXPERTS], [])
        yield from wrong_uses(tool, interface, of_experts, OF_EXPERTS)


def wrong_uses(tool, interface, tree, variables):
    """What an adapter does with variables, which are of the engine's classes, that these do not have or take."""
    for variable, name in variables.items():
        lineage = [name]
        while interface["classes"][lineage[-1]].get("bases", ["ABC"])[0] in interface["classes"]:
            lineage.append(interface["classes"][lineage[-1]]["bases"][0])
        methods = of_class(interface, lineage, "methods")
        has = {*methods, *of_class(interface, lineage, "fields"), *of_class(interface, lineage, "attributes")}
        uses = tool.uses_of([tree], (variable,))
        of_torch = set(dir(torch.nn.Module())) if name == "RoutedExperts" else set()
        if not uses["calls"] and not uses["attributes"]:
            yield f"the adapter has no variable {variable}"
        for method, forms in uses["calls"].items():
            if method in of_torch:
                continue
            signature = without_self(tool.signature_of(methods.get(method, "self")))
            yield from (f"{name}.{method} does not take {form}" for form in forms if not takes(signature, form))
        lacks = set(uses["attributes"]) - has - of_torch - SOME_RELEASES_ONLY
        yield from (f"{name} has no {attribute}" for attribute in lacks)


def wrong_names(tool, interface, adapter):
    """Names that an adapter has as text: attributes of vLLM's spec, values of SGLang's enums."""
    if interface["package"] == "vllm":
        attributes = of_class(interface, BASES["IBPOffloadingSpec"], "attributes")
        yield from (f"the spec sets no {name}" for name in ("_worker", "config") if name not in attributes)
        if not {"num_chunks", "num_blocks"} & set(attributes):
            yield "the spec sets neither num_chunks nor num_blocks"
        if "TRITON" not in interface["classes"].get("UnquantizedMoeBackend", {}).get("members", {"TRITON": ""}):
            yield "there is no backend TRITON"
        if "sync" in interface["uses"]:
            register = interface["classes"]["WeightTransferEngineFactory"]["methods"]["register_engine"]
            if not takes(without_self(tool.signature_of(register)), "3"):
                yield f"the factory of weight transfer engines registers by {register}"
            if "parallel_config" not in of_class(interface, ("WeightTransferEngine",), "attributes"):
                yield "weight transfer engines set no parallel_config"
        return
    if interface["package"] == "lmcache":
        methods = of_class(interface, BASES["IBPL2Adapter"], "methods")
        for name, parameters in NOTIFIES.items():
            if methods.get(name) != f"self, {parameters}":
                yield f"L2AdapterInterface.{name} takes {methods.get(name)}, and not {parameters}"
        return
    pools, policies = (interface["classes"][name]["members"] for name in ("PoolName", "PoolHitPolicy"))
    if pools["KV"] != repr(adapter._KV) or policies["ALL_PAGES"] != repr(adapter._ALL_PAGES):
        yield "the values of enums have changed"
    if policies.get("BLOCK_GROUPS", repr(adapter._BLOCK_GROUPS)) != repr(adapter._BLOCK_GROUPS):
        yield "the value of BLOCK_GROUPS has changed"
    known = {"ALL_PAGES", "TRAILING_PAGES", "BLOCK_GROUPS"}
    yield from (f"the adapter does not know the policy {name}" for name in set(policies) - known)


def wrong(tool, interface, adapter):
    source = Path(adapter.__file__).read_text()
    return [
        *wrong_calls_of_ours(tool, interface, adapter),
        *wrong_methods_of_ours(tool, interface, adapter),
        *wrong_calls_of_theirs(tool, interface, source),
        *wrong_names(tool, interface, adapter),
    ]


# ---- what holds ----


@pytest.mark.parametrize(
    "interface", INTERFACES, ids=lambda interface: f"{interface['package']}-{interface['version']}"
)
def test_a_release(tool, adapter_of, interface):
    check_release(tool, adapter_of, interface)


def check_release(tool, adapter_of, interface):
    """Fails with what does not fit, and what the release changed since the one before."""
    found = wrong(tool, interface, adapter_of(interface["package"]))
    if found:
        pytest.fail("\n".join([f"{interface['package']} {interface['version']}:", *found, *tool.since(interface)]))


def test_releases_that_are_there():
    """The documentation and the adapters name the first and the last of each; the newest three and the first have been
    tried."""
    page = (ROOT / "docs" / "serving.md").read_text()
    for package, count in {"vllm": 8, "sglang": 8, "lmcache": 3}.items():
        versions = [each["version"] for each in INTERFACES if each["package"] == package]
        assert len(versions) >= count
        assert all(f"`{version}`" in page for version in (versions[0], versions[-1])), versions
        name, *ends = shared.TRIED[package]
        assert ends == [versions[0], versions[-1]]
        # These are the releases whose own code has run.
        assert f"| {name} {versions[0]}" in page or f"; {name} {versions[0]}" in page
        assert f"{versions[-3]} to {versions[-1]}" in page
    for role in ("quantization", "experts", "sync"):
        recorded = {each["version"] for each in INTERFACES if role in each["uses"]}
        assert recorded == {"0.26.0", "0.31.0", "0.32.0", "0.33.0"}


@pytest.mark.parametrize("package", ["vllm", "sglang", "lmcache"])
def test_stand_ins(tool, package):
    """They have the parameters, fields and values of the newest release, and all that is abstract there."""
    newest, seen = NEWEST[package]["classes"], set()
    for path in (STUBS / package).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name not in newest:
                continue
            file = str(path.relative_to(STUBS))
            stand_in, real = tool.class_of(node, file), newest[node.name]
            seen.add(node.name)
            for what in ("file", "fields", "bases", "abstract"):
                assert stand_in.get(what) == real.get(what), (node.name, what)
            for what in ("methods", "members"):
                mine, theirs = stand_in.get(what, {}), real.get(what, {})
                assert mine == {name: theirs.get(name) for name in mine}, (node.name, what)
    missing = {"sglang": {"StorageMetrics"}, "lmcache": {"MemoryObj"}} | {
        "vllm": {"UnquantizedLinearMethod", "WeightTransferEngineFactory", "UnquantizedMoeBackend"}.union(
            OF_EXPERTS.values(), *(BASES[name] for name in OF_WEIGHTS)
        )
    }
    assert set(newest) - seen == missing[package]


@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_of_the_tests(tool, name):
    tree = ast.parse((Path(__file__).parent / "test_serving_adapters.py").read_text())
    node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    package, theirs = STAND_INS[name]
    real = NEWEST[package]["classes"][theirs]
    methods = tool.class_of(node, "")["methods"]
    del methods["__init__"]
    assert methods and methods == {each: real["methods"][each] for each in methods}
    assert "page_size" in real["attributes"] if name == "HostPool" else "raw_tensor" in real["properties"]


# ---- what would be seen ----


def changed(package, change):
    interface = copy.deepcopy(NEWEST[package])
    change(interface["classes"], interface["uses"])
    return interface


def method(package, name, **changed):
    """A drift: a class has a method with other parameters."""
    return package, lambda classes, _: classes[name]["methods"].update(changed)


DRIFTS = {
    "another way of making engines": ("vllm", lambda _, uses: uses["sync"]["calls"]["__init__"].append("5")),
    "another step of an update": ("vllm", lambda _, uses: uses["sync"]["calls"].update(prepare_weight_update=["1"])),
    "another name of an update": method("vllm", "WeightTransferEngine", receive_weights="self, info"),
    "another way of registering": method("vllm", "WeightTransferEngineFactory", register_engine="cls, engine"),
    "another way of multiplying": ("vllm", lambda _, uses: uses["weights"]["calls"]["apply"].append("4")),
    "another name of an input": method("vllm", "UnquantizedEmbeddingMethod", embedding="self, layer, ids"),
    "an abstract method of configurations more": (
        "vllm",
        lambda classes, _: classes["QuantizationConfig"]["abstract"].append("get_kernel"),
    ),
    "another way of multiplying by experts": (
        "vllm",
        lambda _, uses: uses["experts"]["calls"]["apply"].append("0, layer, topk_ids, topk_weights, topk_scores, x"),
    ),
    "another way of plain experts": method("vllm", "UnquantizedFusedMoEMethod", apply="self, layer, x, ids"),
    "another way of activating": method("vllm", "FusedMoEExpertsModular", activation="self, output, input"),
    "experts without a map": ("vllm", lambda classes, _: classes["RoutedExperts"]["methods"].pop("expert_map")),
    "another name of a kernel": (
        "vllm",
        lambda classes, _: classes["UnquantizedMoeBackend"]["members"].pop("TRITON"),
    ),
    "a parameter more": ("vllm", lambda _, uses: uses["worker"]["calls"]["submit_store"].append("3, urgent")),
    "a method more": ("vllm", lambda _, uses: uses["worker"]["calls"].update(cancel=["1"])),
    "an attribute more": ("vllm", lambda _, uses: uses["spec"]["attributes"].append("tier")),
    "an abstract method more": ("vllm", lambda classes, _: classes["OffloadingWorker"]["abstract"].append("cancel")),
    "another name of a count": (
        "vllm",
        lambda classes, _: classes["CPUOffloadingSpec"]["attributes"].remove("num_chunks"),
    ),
    "another name of a parameter": method("vllm", "OffloadingWorker", wait="self, jobs"),
    "a field less": ("vllm", lambda classes, _: classes["OffloadingParallelConfig"]["fields"].pop("world_size")),
    "a result without times": ("vllm", lambda classes, _: classes["TransferResult"]["fields"].pop("transfer_time")),
    "another page getter": method("sglang", "HostKVCache", get_data_page="self, index, layer"),
    "a policy more": ("sglang", lambda classes, _: classes["PoolHitPolicy"]["members"].update(NONE="'none'")),
    "another order of arguments": method("lmcache", "L2AdapterInterface", _notify_keys_stored="self, sizes, keys"),
    "a task more": ("lmcache", lambda _, uses: uses["tier"]["calls"].update(submit_move_task=["2"])),
    "another result of a store": method("lmcache", "L2StoreResult", __new__="cls, num_bytes"),
    "another name of memory": ("lmcache", lambda classes, _: classes["MemoryObj"]["methods"].pop("raw_tensor")),
    "a batch more": ("sglang", lambda _, uses: uses["storage"]["calls"].update(batch_get_v3=["2"])),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_drift_is_seen(tool, adapter_of, drift):
    package, change = DRIFTS[drift]
    assert len(wrong(tool, changed(package, change), adapter_of(package))) == 1


def test_the_tool_reads_a_wheel(tool, tmp_path):
    wheel = tmp_path / "vllm-9.9.0-py3-none-any.whl"
    folder = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/"
    worker = """
class Connector:
    def transfer(self, jobs, options):
        self.worker = self.spec.get_worker(jobs)
        self.worker.submit_load(1, jobs, 2, expedited=True)
        self.worker.submit_load(1, *jobs, **options)
        return self.worker.num_jobs
"""
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (STUBS / "vllm").rglob("*.py"):
            archive.write(path, path.relative_to(STUBS))
        archive.writestr(folder + "worker.py", worker)
        archive.writestr("vllm/v1/kv_offload/factory.py", "def make(spec_cls, config):\n    return spec_cls(config)\n")
        archive.writestr("vllm/v1/kv_offload/tiering/factory.py", "def make(tier_cls):\n    return tier_cls()\n")
    release = tool.unpack(wheel, tmp_path / "engines")
    assert release.name == "vllm-9.9.0"
    found = json.loads(tool.write(tool.record(release), tmp_path / "out").read_text())
    assert (found["package"], found["version"]) == ("vllm", "9.9.0")
    assert found["uses"]["worker"] == {"calls": {"submit_load": ["*, **", "3, expedited"]}, "attributes": ["num_jobs"]}
    assert found["uses"]["spec"] == {"calls": {"get_worker": ["1"], "__init__": ["1"]}, "attributes": []}
    for name, record in found["classes"].items():
        assert record["file"] == NEWEST["vllm"]["classes"][name]["file"]
    with pytest.raises(SystemExit, match="wanted one of vllm, sglang, lmcache"):
        tool.unpack("torch-2.0-py3-none-any.whl", tmp_path)


def test_what_has_changed(tool, adapter_of):
    """The message of a failing test names the release and its changes."""
    newest = NEWEST["vllm"]

    def change(classes, uses):
        classes["OffloadingWorker"]["methods"].update(wait="self, jobs")
        classes["OffloadingWorker"]["abstract"].append("cancel")
        del classes["TransferResult"]["fields"]["transfer_time"]
        uses["worker"]["calls"]["cancel"] = ["1"]

    found = changed("vllm", change) | {"version": "9.9.9"}
    at = "classes.OffloadingWorker"
    assert list(tool.changes(newest, found)) == [
        f"{at}.abstract has cancel now",
        f'{at}.methods.wait was "self, job_ids", is "self, jobs"',
        "classes.TransferResult.fields.transfer_time is gone",
        'uses.worker.calls.cancel is new: ["1"]',
        f'version was "{newest["version"]}", is "9.9.9"',
    ]
    with pytest.raises(pytest.fail.Exception) as failure:
        check_release(tool, adapter_of, found)
    lines = str(failure.value).splitlines()
    assert lines[0] == "vllm 9.9.9:" and "worker has no cancel" in lines
    assert f"since {newest['version']}: {at}.abstract has cancel now" in lines
    assert list(tool.changes(["a", "b"], ["b"], "x")) == ["x lacks a"] and not [*tool.changes(newest, newest)]


def test_signatures(tool):
    def method(self, a, /, b, *rest, c, d=3, **more): ...

    kept = tool.class_of(
        ast.parse("class A:\n    def method(self, a: int, /, b: str, *rest, c, d=3, **more): ...").body[0], ""
    )
    signature = tool.signature_of(kept["methods"]["method"])
    assert [(each.name, each.kind) for each in signature.parameters.values()] == [
        (each.name, each.kind) for each in inspect.signature(method).parameters.values()
    ]
    assert signature.parameters["d"].default == "3"
