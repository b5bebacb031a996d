// many.h - the launch of the kernel of many.cuh. Host code.
#ifndef IBP_MANY_H
#define IBP_MANY_H

#include "digits.cuh"

namespace ibp {

// y of up to 64 vectors. *launched: whether the current device has the kernel, and the vectors fit shared memory.
ibp_status multiply_many(const LinearJob &job, ibp_stream stream, bool *launched);

} // namespace ibp

#endif
