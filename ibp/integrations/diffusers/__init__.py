"""Adapters for Hugging Face diffusers: models with coded weights (`weights`), and group offloading with compressed
weights (`groups`).

    from ibp.integrations.diffusers import IbpDiffusersConfig

    DiTTransformer2DModel.from_pretrained(name, quantization_config=IbpDiffusersConfig(), torch_dtype=torch.bfloat16)

Matrices become tables while the model is loaded. Alternatively, compressed weights stay in host memory and are decoded
on the GPU for each use:

    from diffusers.hooks import apply_group_offloading
    from ibp.integrations.diffusers import compress_groups

    apply_group_offloading(model, onload_device=torch.device("cuda"), offload_type="leaf_level", use_stream=True)
    compress_groups(model)

Works with diffusers 0.39 and newer; tested up to 0.42.
"""

from typing import TYPE_CHECKING

import diffusers

from ..shared import check_release, lazily

check_release(diffusers, "0.39")  # before the modules here import names that older releases do not have

if TYPE_CHECKING:
    from .groups import CompressedGroups, GroupBytes, close, compress_groups
    from .weights import IbpDiffusersConfig, IbpDiffusersQuantizer

__all__ = ["CompressedGroups", "GroupBytes", "close", "compress_groups", "IbpDiffusersConfig", "IbpDiffusersQuantizer"]
__getattr__ = lazily(__name__, {"groups": __all__[:4], "weights": __all__[4:]})
