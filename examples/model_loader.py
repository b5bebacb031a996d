"""A loader of your own: python examples/model_loader.py codes a model while a checkpoint of any format is read."""

import tempfile

import torch

import ibp


def load(make, checkpoint, device, **options):
    """Returns (make() in eval mode with the weights of a checkpoint, coded; what is coded). Memory holds one plain
    weight at a time. options: of `ibp.adapters.ModelOptions`."""
    with torch.device("meta"):
        model = make().eval()
    loading = ibp.adapters.ModelLoading(ibp.adapters.ModelOptions(**options), model)
    with ibp.checkpoints.open(checkpoint) as source:
        for name, tensor in source.tensors.items():
            is_table = tensor.table is not None
            value = loading.value_of(name, tensor.table, device, None) if is_table else tensor.tensor().to(device)
            held = loading.put(name, value)
            if isinstance(held, torch.Tensor):  # it stays plain
                module, _, last = name.rpartition(".")
                setattr(model.get_submodule(module), last, torch.nn.Parameter(held, requires_grad=False))
    return model, loading.finish()


def make():
    return torch.nn.Sequential(torch.nn.Embedding(4096, 512), torch.nn.Linear(512, 4096)).bfloat16()


if __name__ == "__main__":
    device, plain, ids = "cuda" if ibp.cuda_is_available() else "cpu", make().eval(), torch.arange(8)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(plain.state_dict(), f"{folder}/model.pt")
        ibp.checkpoints.compress(f"{folder}/model.pt", f"{folder}/model.ibp.safetensors")
        for name in ("model.pt", "model.ibp.safetensors"):
            model, report = load(make, f"{folder}/{name}", device, fused=False)
            same = torch.equal(model(ids.to(device)), plain.to(device)(ids.to(device)))
            print(name, report, "the same results" if same else "OTHER RESULTS", sep=": ")
