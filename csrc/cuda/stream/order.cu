// order.cu - orders the work of two streams by events of the caller.
#include "../../internal/ibp_stream.h"
#include "../errors.h"

extern "C" ibp_status ibp_cuda_record_event(ibp_event event, ibp_stream stream)
{
    return event == nullptr ? IBP_INVALID_ARGUMENT : ibp::check_cuda(cudaEventRecord(event, stream));
}

extern "C" ibp_status ibp_cuda_wait_for_stream(ibp_stream waiting, ibp_stream running, ibp_event event)
{
    if (event == nullptr) return IBP_INVALID_ARGUMENT;
    ibp::FirstError calls;
    calls << cudaEventRecord(event, running);
    if (calls.ok()) calls << cudaStreamWaitEvent(waiting, event, 0);
    return calls.status();
}
