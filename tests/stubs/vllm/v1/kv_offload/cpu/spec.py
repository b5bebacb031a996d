"""The metric definitions of vllm.v1.kv_offload.cpu.spec."""


class CPUOffloadingSpec:
    @classmethod
    def build_metric_definitions(cls, extra_config):
        return {"vllm:kv_offload_cpu_cache_usage_perc": "a gauge"}
