// host_memory.h - host memory as Python objects: new pinned memory, memory of other objects that is pinned in place,
// and memory that processes share.
#ifndef IBP_HOST_MEMORY_H
#define IBP_HOST_MEMORY_H

#include "pinned_pool.h"

#include <pybind11/pybind11.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace ibp {

namespace py = pybind11;

// Throws unless status is IBP_OK: a RuntimeError for an error of CUDA, a ValueError for other errors.
inline void check(ibp_status status)
{
    if (status == IBP_OK) return;
    std::string message = ibp_status_string(status);
    if (status == IBP_CUDA_ERROR) message += std::string(": ") + ibp_cuda_last_error();
    if (status == IBP_CUDA_ERROR || status == IBP_NO_CUDA) throw std::runtime_error(message);
    throw py::value_error(message);
}
inline void check_without_gil(ibp_status status)
{
    if (status == IBP_OK) return;
    const py::gil_scoped_acquire acquire;
    check(status);
}

inline py::buffer_info bytes_at(void *data, size_t num_bytes)
{
    return {static_cast<uint8_t *>(data), static_cast<py::ssize_t>(num_bytes)};
}

// A buffer of pinned host memory from the process's pool, exactly as large as requested. Python can write to it. A
// tensor that torch.frombuffer makes from it keeps it alive.
class PinnedBuffer {
  public:
    PinnedBuffer(size_t num_bytes, int node) : num_bytes_(num_bytes)
    {
        const py::gil_scoped_release release;
        if (num_bytes == 0) return;
        check_without_gil(
            PinnedPool::of_process().take(num_bytes, node < 0 ? node_of_caller() : node, &block_, &is_used_));
    }
    PinnedBuffer(const PinnedBuffer &) = delete;
    PinnedBuffer &operator=(const PinnedBuffer &) = delete;
    ~PinnedBuffer()
    {
        if (block_.data) PinnedPool::of_process().give(block_);
    }

    // Returns whether GPUs may still be reading data that the previous owner of this memory stored in it.
    bool is_used() const { return is_used_; }
    py::buffer_info buffer() const { return bytes_at(block_.data, num_bytes_); }

  private:
    PinnedBlock block_{};
    size_t num_bytes_;
    bool is_used_ = false;
};

// Pins the memory of another object in place, and keeps that object alive until the memory is unpinned.
class PinnedRange {
  public:
    PinnedRange(py::object owner, uintptr_t address, size_t num_bytes)
        : owner_(std::move(owner)), data_(reinterpret_cast<void *>(address)), process_(getpid())
    {
        const py::gil_scoped_release release;
        check_without_gil(ibp_cuda_register_pinned(data_, num_bytes));
    }
    PinnedRange(const PinnedRange &) = delete;
    PinnedRange &operator=(const PinnedRange &) = delete;
    ~PinnedRange()
    {
        if (process_ == getpid()) ibp_cuda_unregister_pinned(data_);
    }

  private:
    py::object owner_;
    void *data_;
    pid_t process_;
};

// Bytes of a file that are mapped into this process while the object lives.
class MappedPages {
  public:
    MappedPages(const MappedPages &) = delete;
    MappedPages &operator=(const MappedPages &) = delete;
    ~MappedPages()
    {
        if (is_pinned()) ibp_cuda_unregister_pinned(mapped_);
        munmap(mapped_, mapped_bytes_);
    }

    bool is_pinned() const { return pinned_in_ == getpid(); }

    // Pins the memory for this process, unless it is pinned already. After fork() a child must pin it again. Only one
    // thread at a time may call this function.
    void pin()
    {
        if (is_pinned()) return;
        {
            const py::gil_scoped_release release;
            check_without_gil(pin_(mapped_, mapped_bytes_));
        }
        pinned_in_ = getpid();
    }

    // Makes the system read num_bytes bytes of the buffer into memory, beginning with byte `start`. Returns false if
    // the file has become too short or cannot be read. The system would end a process that used such bytes. Linux
    // before 5.14 does not tell whether bytes can be read; there the result is always true.
    bool load(size_t start, size_t num_bytes) const
    {
        const size_t first = skipped_bytes_ + start, end = first + num_bytes;
        if (end > mapped_bytes_ || end < start) throw std::out_of_range("the map has no such bytes");
        const size_t before = first % static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const py::gil_scoped_release release;
        const int status = madvise(static_cast<uint8_t *>(mapped_) + first - before, num_bytes + before, kPopulateRead);
        return status == 0 || errno == EINVAL;
    }

    py::buffer_info buffer() const
    {
        return bytes_at(static_cast<uint8_t *>(mapped_) + skipped_bytes_, mapped_bytes_ - skipped_bytes_);
    }

  protected:
    // Maps num_bytes bytes of a file, beginning with byte `start`.
    //
    // pinning: the function with which pin() pins the memory.
    // what: a name for the memory, for the error that is thrown if the file cannot be mapped.
    MappedPages(int file, size_t start, size_t num_bytes, int protection, ibp_status (*pinning)(void *, size_t),
                const char *what)
        : skipped_bytes_(start % static_cast<size_t>(sysconf(_SC_PAGESIZE))), mapped_bytes_(num_bytes + skipped_bytes_),
          pin_(pinning)
    {
        const auto from = static_cast<off_t>(start - skipped_bytes_);
        mapped_ = mmap(nullptr, mapped_bytes_, protection, MAP_SHARED, file, from);
        if (mapped_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), what);
    }

    void *mapped_ = nullptr;

  private:
    static constexpr int kPopulateRead = 22; // MADV_POPULATE_READ, which older headers lack

    const size_t skipped_bytes_, mapped_bytes_;
    ibp_status (*const pin_)(void *host, size_t num_bytes);
    pid_t pinned_in_ = 0;
};

// Memory that belongs to a file descriptor. All processes that map the descriptor share this memory, but each process
// must call pin() to pin it. The memory stays pinned in that process until the object is destroyed.
class SharedPages : public MappedPages {
  public:
    // is_new: true if no process has written to the memory yet. Then the constructor allocates the memory's pages and
    // sets them to zero.
    // node: the NUMA node that new pages are allocated on; if negative, the node of the calling thread.
    SharedPages(int file, size_t num_bytes, bool is_new, int node)
        : MappedPages(file, 0, num_bytes, PROT_READ | PROT_WRITE, ibp_cuda_register_pinned, "shared memory")
    {
        const py::gil_scoped_release release;
        if (is_new) make_pages(mapped_, num_bytes, node);
    }
};

// Bytes of a file in the page cache, which must not be written to. All processes that map the file share these bytes,
// and GPUs can read them if the system supports it. The buffer claims to be writable because torch.frombuffer warns
// about read-only buffers.
class FilePages : public MappedPages {
  public:
    FilePages(int file, size_t start, size_t num_bytes)
        : MappedPages(file, start, num_bytes, PROT_READ, ibp_cuda_register_read_only, "mapped file")
    {
    }
};

} // namespace ibp

#endif
