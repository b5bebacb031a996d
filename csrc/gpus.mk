# GPUS: the compute capabilities of the GPUs of this machine that the kernels can be compiled for, the oldest first,
# such as "8.0 9.0". Empty where there is none.
# HAS_GPU: not empty where there is a GPU, whether or not nvidia-smi can tell which.
GPUS := $(strip $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
    | grep -E '^([89]|[1-9][0-9])\.[0-9]$$' | sort -uV))
HAS_GPU := $(GPUS)$(wildcard /dev/nvidia[0-9]*)
