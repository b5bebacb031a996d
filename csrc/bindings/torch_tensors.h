// torch_tensors.h - tensors as checked memory: every error of an argument, or of a call of torch, becomes a
// std::runtime_error, which torch hands to Python as a RuntimeError.
//
// Messages are put together without streams: a compiler that links a part of libstdc++ statically makes those crash
// beside torch's libstdc++. Torch's own inline functions write their messages to streams, so the two macros by which
// they check are replaced here, before those functions are included. No other file includes headers of torch's stable
// ABI.
#ifndef IBP_TORCH_TENSORS_H
#define IBP_TORCH_TENSORS_H

#include "ibp.h"
#include "ibp_cuda.h"
#include "table_handle.h"

#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

// Absent from a torch without CUDA, and from one before 2.13.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream) __attribute__((weak));
extern "C" const char *torch_exception_get_what_without_backtrace() __attribute__((weak));

namespace ibp_torch {

inline std::string to_text(const char *text) { return text; }
inline std::string to_text(int64_t number) { return std::to_string(number); }

// Throws what becomes a RuntimeError in Python unless the condition holds.
template <typename... Parts> void require(bool condition, const Parts &...parts)
{
    if (!condition) throw std::runtime_error("ibp: " + (to_text(parts) + ...));
}

[[noreturn]] inline void fail_in_torch(const char *what)
{
    throw std::runtime_error(std::string("ibp: torch refuses: ") + what);
}

// After a call of torch's C functions has returned an error.
[[noreturn]] inline void fail_in_torch_call(const char *call)
{
    fail_in_torch(torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : call);
}

} // namespace ibp_torch

#if !defined(TORCH_ERROR_CODE_CHECK) || !defined(STD_TORCH_CHECK)
#error "torch's headers check errors by macros that this file does not replace"
#endif
#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)          \
    if ((call) != TORCH_SUCCESS) {            \
        ibp_torch::fail_in_torch_call(#call); \
    }
#undef STD_TORCH_CHECK
#define STD_TORCH_CHECK(condition, ...)       \
    if (!(condition)) {                       \
        ibp_torch::fail_in_torch(#condition); \
    }

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace ibp_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

inline void check(ibp_status status, const char *what)
{
    const bool is_cuda = status == IBP_CUDA_ERROR;
    require(status == IBP_OK, what, ": ", ibp_status_string(status), is_cuda ? ": " : "",
            is_cuda ? ibp_cuda_last_error() : "");
}

// ---- sizes ----

constexpr int64_t kMaxBytes = INT64_MAX / IBP_OVERFLOW_ALIGN; // of a table's items, as in the core

// count * each_bytes, where both are at least 0 and the product at most kMaxBytes.
inline int64_t total_bytes(int64_t count, int64_t each_bytes, const char *name)
{
    int64_t bytes = 0;
    const bool fits = !__builtin_mul_overflow(count, each_bytes, &bytes) && bytes <= kMaxBytes;
    require(count >= 0 && each_bytes >= 0 && fits, name, ": ", count, " of ", each_bytes,
            " bytes each are out of range");
    return bytes;
}

// How many items of item_bytes bytes num_bytes bytes make; the last item may be short. num_bytes >= 0.
inline int64_t divide_up(int64_t num_bytes, int64_t item_bytes)
{
    return num_bytes / item_bytes + (num_bytes % item_bytes != 0);
}

inline uint32_t to_u32(int64_t value, int64_t low, int64_t high, const char *name)
{
    require(value >= low && value <= high, name, " is ", value, ", outside [", low, ", ", high, "]");
    return static_cast<uint32_t>(value);
}

// ---- memory ----

// The elements of a tensor, one after the other. data: nullptr if there are none.
struct Memory {
    uint8_t *data;
    int64_t num_bytes;
};

inline Memory memory_of(const Tensor &tensor, const char *name)
{
    require(tensor.is_contiguous(), name, " is not contiguous");
    const auto element_bytes = static_cast<int64_t>(tensor.element_size());
    const int64_t num_bytes = total_bytes(tensor.numel(), element_bytes, name);
    if (num_bytes == 0) return {nullptr, 0};
    int64_t storage_bytes = 0, offset = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &storage_bytes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
    const bool is_held =
        offset >= 0 && storage_bytes >= num_bytes && offset <= (storage_bytes - num_bytes) / element_bytes;
    auto *const data = static_cast<uint8_t *>(tensor.data_ptr());
    require(is_held && data != nullptr, name, " has more elements than its storage");
    return {data, num_bytes};
}

// The data of a contiguous tensor of the given dtype and at least the given number of elements; nullptr if it is empty.
template <typename T> T *data_of(const Tensor &tensor, ScalarType dtype, int64_t least, const char *name)
{
    require(tensor.scalar_type() == dtype, name, " has the wrong dtype");
    require(tensor.numel() >= least, name, " has ", tensor.numel(), " elements, ", least, " are needed");
    return static_cast<T *>(static_cast<void *>(memory_of(tensor, name).data));
}

inline uint8_t *bytes_of(const Tensor &tensor, int64_t least, const char *name)
{
    return data_of<uint8_t>(tensor, ScalarType::Byte, least, name);
}

// The same of a tensor whose numbers the core takes as unsigned.
inline uint64_t *unsigned_longs_of(const Tensor &tensor, int64_t least, const char *name)
{
    return static_cast<uint64_t *>(static_cast<void *>(data_of<int64_t>(tensor, ScalarType::Long, least, name)));
}

// The memory of a contiguous tensor of any dtype that has room for least bytes; nullptr if it is empty.
inline uint8_t *room_of(const Tensor &tensor, int64_t least, const char *name)
{
    const Memory memory = memory_of(tensor, name);
    require(memory.num_bytes >= least, name, " has ", memory.num_bytes, " bytes, ", least, " are needed");
    return memory.data;
}

// The memory of a call's tensors. No byte that is written belongs to another tensor: an operation that reads what it
// writes at the same time would act on numbers that it has not checked.
class Footprints {
  public:
    // Names and tensors, which may be optional ones, in turn.
    template <typename T, typename... More> void reads(const char *name, const T &tensor, const More &...more)
    {
        add(name, tensor, false);
        if constexpr (sizeof...(more) > 0) reads(more...);
    }
    template <typename T, typename... More> void writes(const char *name, const T &tensor, const More &...more)
    {
        add(name, tensor, true);
        if constexpr (sizeof...(more) > 0) writes(more...);
    }
    // Memory that has been checked.
    void reads_bytes(const char *name, const void *data, int64_t num_bytes)
    {
        add({name, {const_cast<uint8_t *>(static_cast<const uint8_t *>(data)), num_bytes}, false});
    }
    void add_range(const char *name, const ibp::Range &range, bool is_written)
    {
        const auto num_bytes = static_cast<int64_t>(range.end - range.first);
        add({name, {reinterpret_cast<uint8_t *>(range.first), num_bytes}, is_written});
    }

  private:
    struct Footprint {
        const char *name;
        Memory memory;
        bool is_written;
    };

    void add(const char *name, const Tensor &tensor, bool is_written)
    {
        add({name, memory_of(tensor, name), is_written});
    }
    void add(const char *name, const Memory &memory, bool is_written) { add({name, memory, is_written}); }
    void add(const char *name, const std::optional<Tensor> &tensor, bool is_written)
    {
        if (tensor) add(name, *tensor, is_written);
    }
    void add(const Footprint &added)
    {
        const Memory &memory = added.memory;
        if (memory.data == nullptr) return;
        for (size_t i = 0; i < count_; i++) {
            const Footprint &other = footprints_[i];
            const bool apart = memory.data + memory.num_bytes <= other.memory.data ||
                               other.memory.data + other.memory.num_bytes <= memory.data;
            require(apart || !(added.is_written || other.is_written), added.name, " and ", other.name, " share memory");
        }
        require(count_ < footprints_.size(), "too many tensors");
        footprints_[count_++] = added;
    }

    std::array<Footprint, 32> footprints_{}; // more than any operation has
    size_t count_ = 0;
};

// ---- devices ----

inline int32_t device_type_of(const Tensor &tensor)
{
    int32_t type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    return type;
}

// Whether an argument is on the device of a tensor.
inline bool is_on(const Tensor &tensor, const Tensor &other)
{
    return device_type_of(tensor) == device_type_of(other) &&
           (!other.is_cuda() || tensor.get_device_index() == other.get_device_index());
}
inline bool is_on(const std::optional<Tensor> &tensor, const Tensor &other) { return !tensor || is_on(*tensor, other); }
template <typename Group> bool is_on(const Group &group, const Tensor &other) { return group.is_on(other); }

inline void require_cpu(std::initializer_list<const Tensor *> tensors)
{
    for (const Tensor *tensor : tensors)
        require(device_type_of(*tensor) == aoti_torch_device_type_cpu(),
                "all tensors must be on the CPU, or all on one CUDA device");
}

// Where a call runs: on the CPU, or on the CUDA device of its tensors, which is this thread's current one while the
// object lives. Torch also calls operations whose tensors are on several devices.
class Device {
  public:
    // others: tensors, optional ones, and structs of arguments that have is_on(tensor).
    template <typename... Others> explicit Device(const Tensor &first, const Others &...others) : first_(first)
    {
        if (!is_cuda_) require_cpu({&first});
        (require_here(others), ...);
        if (is_cuda_) guard_ = std::make_unique<DeviceGuard>(first.get_device_index());
    }

    bool is_cuda() const { return is_cuda_; }
    void require_cuda() const { require(is_cuda_, "all tensors must be on the CPU, or all on one CUDA device"); }

    // Tensors that may be on other CUDA devices, which read each other's memory.
    void require_near(const std::vector<Tensor> &tensors) const
    {
        for (const Tensor &tensor : tensors) {
            if (!is_cuda_) require_here(tensor);
            require(tensor.is_cuda() == is_cuda_, "all tensors must be on the CPU, or all on CUDA devices");
        }
    }

    // Torch's current stream of the CUDA device.
    ibp_stream stream() const
    {
        require(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA support");
        void *stream = nullptr;
        require(aoti_torch_get_current_cuda_stream(first_.get_device_index(), &stream) == TORCH_SUCCESS,
                "no current CUDA stream");
        return static_cast<ibp_stream>(stream);
    }

  private:
    template <typename Argument> void require_here(const Argument &argument) const
    {
        require(is_on(argument, first_), is_cuda_ ? "all tensors must be on the same CUDA device"
                                                  : "all tensors must be on the CPU, or all on one CUDA device");
    }

    const Tensor &first_;
    const bool is_cuda_ = first_.is_cuda();
    std::unique_ptr<DeviceGuard> guard_; // optional would do, but that gcc 12 warns of it
};

// ---- new tensors ----

inline Tensor new_tensor(const Tensor &like, std::vector<int64_t> sizes, ScalarType dtype)
{
    return torch::stable::new_empty(like, sizes, dtype);
}

inline Tensor new_counts(const Tensor &like, int64_t size)
{
    Tensor counts = new_tensor(like, {size}, ScalarType::Long);
    torch::stable::zero_(counts);
    return counts;
}

// ---- operations ----

// The arguments of an operation as torch gives them, taken one after the other.
class Arguments {
  public:
    explicit Arguments(const StableIValue *values) : next_(values) {}

    // The next value; or a struct of the next T::kValues values, which T's constructor takes.
    template <typename T> T take()
    {
        if constexpr (kIsGroup<T>)
            return T(*this);
        else
            return torch::stable::detail::to<T>(*next_++);
    }
    template <typename T> static constexpr uint64_t count()
    {
        if constexpr (kIsGroup<T>)
            return T::kValues;
        else
            return 1;
    }

  private:
    template <typename T> static constexpr bool kIsGroup = std::is_constructible_v<T, Arguments &>;

    const StableIValue *next_;
};

template <typename Result, typename... Parameters>
void call(Result (*function)(Parameters...), StableIValue *stack, uint64_t num_arguments)
{
    require(num_arguments == (Arguments::count<std::decay_t<Parameters>>() + ...), "a schema has other arguments");
    Arguments from(stack);
    std::tuple<std::decay_t<Parameters>...> given{from.take<std::decay_t<Parameters>>()...};
    const auto give = [&](const auto &...results) { ((*stack++ = torch::stable::detail::from(results)), ...); };
    if constexpr (std::is_void_v<Result>)
        std::apply(function, given);
    else if constexpr (std::is_same_v<Result, Tensor>)
        give(std::apply(function, given));
    else
        std::apply(give, std::apply(function, given));
}

// A function as the implementation of an operation, as TORCH_BOX makes it of one without structs.
template <auto function> void operation(StableIValue *stack, uint64_t num_arguments, uint64_t)
{
    call(function, stack, num_arguments);
}

} // namespace ibp_torch

#endif
