import abc
import threading


class HostKVCache(abc.ABC):
    @abc.abstractmethod
    def get_size_per_token(self): ...

    @abc.abstractmethod
    def init_kv_buffer(self): ...

    @abc.abstractmethod
    def load_to_device_per_layer(
        self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False
    ): ...

    @abc.abstractmethod
    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend): ...

    @abc.abstractmethod
    def get_data_page(self, index, flat=True): ...

    @abc.abstractmethod
    def get_dummy_flat_data_page(self): ...

    @abc.abstractmethod
    def set_from_flat_data_page(self, index, data_page): ...

    def __init__(
        self,
        *,
        dtype,
        device_capacity_tokens,
        size_per_token,
        start_layer,
        end_layer,
        host_to_device_ratio,
        host_size,
        page_size,
        layout,
        pin_memory,
        device,
        allocator_type="default",
        dcp_size=1,
        dcp_rank=0,
        pool_label="kv",
        is_dummy=False,
        host_token_capacity=None,
    ):
        self.dtype, self.size_per_token, self.page_size, self.pin_memory = dtype, size_per_token, page_size, pin_memory
        self.page_num = int(host_size * 1e9 // size_per_token) // page_size + 1
        self.size, self.device, self.layout = self.page_num * page_size, device, layout
        self.kv_buffer, self.lock = self.init_kv_buffer(), threading.RLock()

    def destroy(self):
        self.kv_buffer = None
