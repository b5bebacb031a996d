import torch

from sglang.srt.mem_cache.pool_host.base import HostKVCache


class MHATokenToKVPoolHost(HostKVCache):
    def __init__(
        self,
        buffer_info,
        host_to_device_ratio,
        host_size,
        page_size,
        layout,
        pin_memory=True,
        device="cpu",
        allocator_type="default",
        *,
        device_capacity_tokens,
        start_layer,
        end_layer,
        draft_buffer_infos=(),
        write_back_staging=None,
        pool_label="kv",
        head_group_num=1,
        host_token_capacity=None,
    ):
        infos = (buffer_info, *draft_buffer_infos)
        self.dtype, self.head_num, self.head_dim = buffer_info.dtype, buffer_info.head_num, buffer_info.head_dim
        self.target_layer_num = len(buffer_info.buffers.k)
        self.layer_num = self.target_layer_num + len(draft_buffer_infos)
        super().__init__(
            dtype=self.dtype,
            device_capacity_tokens=device_capacity_tokens,
            size_per_token=self.get_size_per_token(),
            start_layer=start_layer,
            end_layer=end_layer,
            host_to_device_ratio=host_to_device_ratio,
            host_size=host_size,
            page_size=page_size,
            layout=layout,
            pin_memory=pin_memory,
            device=device,
        )
        self.device_k_buffers = tuple(tensor for info in infos for tensor in info.buffers.k)
        self.device_v_buffers = tuple(tensor for info in infos for tensor in info.buffers.v)
        self._init_write_back_staging_buffers(buffer_info, write_back_staging)

    def get_size_per_token(self):
        return 2 * self.layer_num * self.head_num * self.head_dim * self.dtype.itemsize

    def get_dummy_flat_data_page(self):
        shape = (2, self.layer_num, self.page_size, self.head_num, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, pin_memory=self.pin_memory).flatten()


class AsymmetricMHATokenToKVPoolHost(HostKVCache):
    """For keys and values of different widths."""
