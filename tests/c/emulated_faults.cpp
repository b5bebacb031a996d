/* emulated_faults.cpp - kernels that are right, and kernels with one mistake each, under emulated_simt.h: what it
 * should see it must see. Usage: emulated_faults NAME. Ends with status 1 if a result is wrong; is aborted where a
 * kernel breaks a rule. */
#include "emulated_simt.h"

#include <string>

namespace ibp {

constexpr uint32_t kAll = 0xffffffffu;

uint32_t *words() /* of shared memory */
{
    extern __shared__ uint4 shared[];
    return reinterpret_cast<uint32_t *>(shared);
}

/* ---- right ---- */

__global__ void exchanges(uint32_t *wrong)
{
    const uint32_t lane = threadIdx.x % 32u, part = lane / 8u * 8u;
    const auto expect = [&](bool good) { *wrong += !good; };
    expect(__shfl_sync(kAll, lane, 35) == 3u);
    expect(__shfl_sync(kAll, lane, 9, 8) == part + 1u);
    expect(__shfl_up_sync(kAll, lane, 3) == (lane < 3u ? lane : lane - 3u));
    expect(__shfl_up_sync(kAll, lane, 3, 8) == (lane % 8u < 3u ? lane : lane - 3u));
    expect(__shfl_down_sync(kAll, lane, 3, 8) == (lane % 8u < 5u ? lane + 3u : lane));
    expect(__shfl_xor_sync(kAll, lane, 5, 8) == (lane ^ 5u));
    expect(__shfl_xor_sync(kAll, uint64_t{lane} << 40, 16) == uint64_t{lane ^ 16u} << 40);
    expect(__shfl_xor_sync(kAll, lane, 8, 8) ==
           (lane & 8u ? lane ^ 8u : lane)); /* earlier parts can be read, later ones not */
    expect(__ballot_sync(kAll, lane % 3u == 0u) == 0x49249249u);
    expect(__any_sync(kAll, lane == 7u) == 1 && __any_sync(kAll, 0) == 0);
    expect(__all_sync(kAll, lane < 32u) == 1 && __all_sync(kAll, lane != 7u) == 0);
    expect(__reduce_add_sync(kAll, lane) == 496u && __reduce_add_sync(kAll, 0x80000000u) == 0u);
    expect(__reduce_max_sync(kAll, lane | 0x80000000u) == 0x8000001fu &&
           __reduce_max_sync(kAll, static_cast<int>(lane) - 40) == -9);
    expect(__reduce_min_sync(kAll, lane + 5u) == 5u && __reduce_or_sync(kAll, 1u << lane) == kAll &&
           __reduce_and_sync(kAll, ~(1u << lane)) == 0u);
    expect(__match_any_sync(kAll, lane / 8u) == 0xffu << part);
    if (lane < 8u)
        expect(__reduce_add_sync(0xffu, lane) == 28u); /* a part of the warp by itself */
    else
        expect(__reduce_add_sync(0xffffff00u, 1u) == 24u);
}

/* Every warp's number is seen by every other one; the first two warps meet by themselves. */
__global__ void barriers(uint32_t *wrong)
{
    const uint32_t warp = threadIdx.x / 32u;
    for (uint32_t round = 1; round < 5u; round++) {
        if (threadIdx.x % 32u == 0) words()[warp] = round * warp;
        __syncthreads();
        for (uint32_t w = 0; w < blockDim.x / 32u; w++) *wrong += words()[w] != round * w;
        __syncthreads();
        if (warp >= 2u) continue;
        words()[128u + threadIdx.x] = round;
        named_barrier(1, 64);
        *wrong += words()[128u + 63u - threadIdx.x] != round;
        named_barrier(1, 64);
    }
}

__global__ void numbers(uint32_t *wrong)
{
    const auto expect = [&](bool good) { *wrong += !good; };
    expect(__byte_perm(0x33221100u, 0x77665544u, 0x7250) == 0x77225500u);
    expect(__byte_perm(0x80u, 0x7f000000u, 0x8f08) == 0xff0080ffu); /* 8 and more: the sign of the byte */
    expect(__funnelshift_r(0x12345678u, 0x9abcdef0u, 40) == 0xf0123456u && __funnelshift_r(1, 2, 32) == 1u);
    expect(__funnelshift_l(0x12345678u, 0x9abcdef0u, 8) == 0xbcdef012u);
    expect(__clz(1) == 31 && __clz(0) == 32 && __ffs(8) == 4 && __ffs(0) == 0 && __popcll(~0ull) == 64 &&
           __brev(1) == 0x80000000u);
    expect(__umulhi(0x80000000u, 6) == 3u && __vcmpeq4(0x11223344u, 0x11003300u) == 0xff00ff00u);
    uint32_t cell = 5;
    expect(atomicAdd(&cell, 2) == 5u && atomicOr(&cell, 8u) == 7u && atomicCAS(&cell, 15u, 1u) == 15u &&
           atomicCAS(&cell, 15u, 2u) == 1u && cell == 1u);
    expect(max(-1, 1u) == 0xffffffffu && min(int64_t{-1}, int64_t{1}) == -1);
}

/* ---- wrong ---- */

__global__ void no_sync(uint32_t *wrong)
{
    const uint32_t lane = threadIdx.x % 32u;
    words()[lane] = lane;
    *wrong += words()[31u - lane] != 31u - lane;
}
__global__ void diverging(uint32_t *)
{
    if (threadIdx.x % 2u)
        __syncwarp();
    else
        __ballot_sync(kAll, 1);
}
__global__ void other_line(uint32_t *)
{
    if (threadIdx.x % 2u)
        __syncwarp();
    else
        __syncwarp();
}
template <bool ODD> __device__ __forceinline__ void sync_of() { __syncwarp(); }
__global__ void other_instance(uint32_t *)
{
    if (threadIdx.x % 2u)
        sync_of<true>();
    else
        sync_of<false>();
}
__device__ __noinline__ void sync_of_one() { __syncwarp(); }
__global__ void other_call(uint32_t *)
{
    if (threadIdx.x % 2u)
        sync_of_one();
    else
        sync_of_one();
}
__global__ void returning(uint32_t *)
{
    if (threadIdx.x == 5u) return;
    __syncwarp();
}
__global__ void outside_mask(uint32_t *) { __ballot_sync(0xffffu, 1); }
__global__ void absent_source(uint32_t *)
{
    if (threadIdx.x % 32u < 16u) __shfl_sync(0xffffu, threadIdx.x, 20);
}
__global__ void missing_warp(uint32_t *)
{
    if (threadIdx.x >= 32u) __syncthreads();
}
__global__ void different_counts(uint32_t *) { named_barrier(1, threadIdx.x < 32u ? 32u * 2u : 32u * 3u); }
__global__ void past_shared(uint32_t *wrong) { *wrong += words()[256]; }
__global__ void misaligned(uint32_t *wrong) { *wrong += __ldg(reinterpret_cast<const uint4 *>(words() + 2)).x; }

} // namespace ibp

int main(int, char **arguments)
{
    static const struct {
        const char *name;
        void (*kernel)(uint32_t *);
    } kernels[] = {
#define KERNEL(name) {#name, ibp::name}
        KERNEL(exchanges),        KERNEL(barriers),     KERNEL(numbers),        KERNEL(no_sync),
        KERNEL(diverging),        KERNEL(other_line),   KERNEL(other_instance), KERNEL(other_call),
        KERNEL(returning),        KERNEL(outside_mask), KERNEL(absent_source),  KERNEL(missing_warp),
        KERNEL(different_counts), KERNEL(past_shared),  KERNEL(misaligned),
#undef KERNEL
    };
    for (const auto &one : kernels) {
        if (one.name != std::string(arguments[1])) continue;
        uint32_t wrong = 0;
        for (uint32_t i = 0; i < 10; i++) emulate(one.kernel, 2, 96, 1024, nullptr, &wrong);
        printf("%u wrong\n", wrong);
        return wrong != 0;
    }
    return 2;
}
