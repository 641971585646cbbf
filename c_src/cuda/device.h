#ifndef DLX_CUDA_DEVICE_H_
#define DLX_CUDA_DEVICE_H_

#include "dlpack_abi.h"

/* 1 for device memory that has streams which dlx can order. GIL: not needed. */
static inline int dlx_is_cuda(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
}

#endif
