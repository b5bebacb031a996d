"""Diffusion transformers whose weights are coded while diffusers loads them."""

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp._files import read_header
from ibp.nn._tables import TableModule

pytestmark = pytest.mark.frameworks
diffusers = pytest.importorskip("diffusers")
IbpDiffusersConfig = pytest.importorskip("ibp.integrations.diffusers").IbpDiffusersConfig
LEAST = 1 << 14


def dit():
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "in_channels": 4, "sample_size": 8, "num_layers": 2}
    return diffusers.DiTTransformer2DModel(**sizes, out_channels=4, norm_num_groups=1)


def sd3():
    sizes = {"num_attention_heads": 4, "attention_head_dim": 32, "in_channels": 4, "sample_size": 8, "num_layers": 2}
    more = {"joint_attention_dim": 64, "caption_projection_dim": 128, "pooled_projection_dim": 64, "out_channels": 4}
    return diffusers.SD3Transformer2DModel(**sizes, **more)


@torch.no_grad()
def outputs(model):
    torch.manual_seed(1)
    x, time = torch.randn(2, 4, 8, 8).bfloat16(), torch.tensor([3, 7])
    if isinstance(model, diffusers.DiTTransformer2DModel):
        return model(x, timestep=time, class_labels=torch.tensor([1, 2])).sample
    texts, pooled = torch.randn(2, 5, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    return model(x, encoder_hidden_states=texts, pooled_projections=pooled, timestep=time).sample


@pytest.fixture(params=[dit, sd3], ids=["dit", "sd3"])
def saved(request, tmp_path):
    """(directory, plain model)"""
    torch.manual_seed(0)
    made = request.param().bfloat16()
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.02)  # some are zeros at first
    made.save_pretrained(tmp_path / "plain", max_shard_size="500KB")
    return tmp_path / "plain", load(made, tmp_path / "plain")


def load(like, folder, **options):
    return type(like).from_pretrained(folder, torch_dtype=torch.bfloat16, **options)


def num_tables(model):
    return sum(isinstance(module, TableModule) for module in model.modules())


def test_plain_checkpoints(saved, tmp_path):
    folder, plain = saved
    model = load(plain, folder, quantization_config=IbpDiffusersConfig(min_bytes=LEAST))
    assert num_tables(model) == len(model.hf_quantizer.report.coded) > 15 and model.hf_quantizer.report.savings > 0.1
    assert_same_bits(outputs(model), outputs(plain))
    model.save_pretrained(tmp_path / "again")
    again = load(plain, tmp_path / "again")
    assert num_tables(again) == 0 and not hasattr(again, "hf_quantizer")
    assert_same_bits(outputs(again), outputs(plain))
    partly = load(
        plain, folder, quantization_config=IbpDiffusersConfig(min_bytes=LEAST, include="transformer_blocks.0")
    )
    assert 0 < num_tables(partly) < num_tables(model)
    with pytest.raises(ValueError, match="ibp.offload"):
        load(plain, folder, quantization_config=IbpDiffusersConfig(), device_map={"": "disk"})


def test_compressed_directories(saved, tmp_path):
    folder, plain = saved
    small = tmp_path / "small"
    ibp.checkpoints.compress(folder, f"{small}/", device="cpu", shard_bytes=400_000)
    config = (small / "config.json").read_text()
    (small / "config.json").write_text(config.replace('"ibp"', f'"ibp", "min_bytes": {LEAST}'))
    model, info = load(plain, small, output_loading_info=True)
    assert not any(info.values()) and num_tables(model) > 15
    assert_same_bits(outputs(model), outputs(plain))
    ibp.checkpoints.decompress(small, f"{tmp_path / 'back'}/")
    assert num_tables(load(plain, tmp_path / "back")) == 0
    assert_same_bits(outputs(load(plain, tmp_path / "back")), outputs(plain))


@pytest.mark.parametrize("part", ["overflow", "plain"])
def test_damaged_files_are_not_loaded(part, tmp_path):
    made, small = dit().bfloat16(), tmp_path / "small"
    made.save_pretrained(tmp_path / "plain")
    ibp.checkpoints.compress(tmp_path / "plain", f"{small}/", device="cpu")
    (path,) = small.glob("*.safetensors")
    tensors = read_header(path).tensors
    name = next(name for name in tensors if name.endswith(":overflow" if part == "overflow" else "bias"))
    data = bytearray(path.read_bytes())
    data[tensors[name].start] ^= 2
    path.write_bytes(data)
    with pytest.raises(ibp.ChecksumError, match=f"{path}: block .* is damaged"):
        load(made, small)


def test_pipelines_whose_models_are_coded(tmp_path):
    torch.manual_seed(0)
    model = dit().bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8).bfloat16()
    diffusers.DiTPipeline(model, vae, diffusers.DDIMScheduler()).save_pretrained(tmp_path / "plain")
    report = ibp.checkpoints.compress(tmp_path / "plain", f"{tmp_path}/small/", device="cpu")
    names = {f"{part}/diffusion_pytorch_model.ibp.safetensors" for part in ("transformer", "vae")}
    assert set(report.files) == names and "scheduler/scheduler_config.json" in report.other_files
    plain, loaded = (
        diffusers.DiTPipeline.from_pretrained(tmp_path / name, torch_dtype=torch.bfloat16)
        for name in ("plain", "small")
    )
    assert_same_bits(outputs(loaded.transformer), outputs(plain.transformer))
    for name, value in plain.vae.state_dict().items():
        assert_same_bits(loaded.vae.state_dict()[name], value)
