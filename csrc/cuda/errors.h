// errors.h - turns errors of CUDA calls into statuses, and keeps the first error of several calls. Host code.
#ifndef IBP_CUDA_ERRORS_H
#define IBP_CUDA_ERRORS_H

#include "ibp_cuda.h"

namespace ibp {

// Returns IBP_OK if a CUDA call succeeded. Otherwise records its error for ibp_cuda_last_error, and returns
// IBP_CUDA_ERROR.
ibp_status check_cuda(cudaError_t error);

// The status of several calls: the first error, or IBP_OK.
class FirstError {
  public:
    FirstError &operator<<(cudaError_t error) { return ok() ? *this << check_cuda(error) : *this; }
    FirstError &operator<<(ibp_status status)
    {
        if (ok()) status_ = status;
        return *this;
    }

    bool ok() const { return status_ == IBP_OK; }
    ibp_status status() const { return status_; }

  private:
    ibp_status status_ = IBP_OK;
};

} // namespace ibp

#endif
