/* emulated_races.cpp - what -fsanitize=thread makes kernels call, for simt::touch instead of the sanitizer's own
 * library. */
#include "emulated_simt.h"

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

#define ACCESS(name, num_bytes, writes) \
    void __tsan_##name(void *p) { simt::touch(p, num_bytes, writes, __builtin_return_address(0)); }
#define ACCESSES(num_bytes)                             \
    ACCESS(read##num_bytes, num_bytes, false)           \
    ACCESS(write##num_bytes, num_bytes, true)           \
    ACCESS(unaligned_read##num_bytes, num_bytes, false) \
    ACCESS(unaligned_write##num_bytes, num_bytes, true) \
    ACCESS(volatile_read##num_bytes, num_bytes, false)  \
    ACCESS(volatile_write##num_bytes, num_bytes, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void *p, size_t num_bytes) { simt::touch(p, num_bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void *p, size_t num_bytes) { simt::touch(p, num_bytes, true, __builtin_return_address(0)); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
}
