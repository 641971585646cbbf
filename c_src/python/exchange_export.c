/* dlx.Tensor's own exchange table, static and published on the type: C programs make, take and look
 * at dlx.Tensor objects without a capsule.
 *
 * No slot synchronises anything with its caller. Device memory belongs to dlx's own stream, which
 * current_work_stream returns: exported memory is ready on that stream, and imported memory is
 * taken to be ready there. */

#include "dlx_python.h"
#include "gil.h"

#include <stdio.h>

/* Which builtin exception says a status best; SetError wants its name. GIL: not needed. */
static const char* kind_of(int status) {
  switch (status) {
    case DLX_E_MEMORY:
      return "MemoryError";
    case DLX_E_DEVICE:
    case DLX_E_NO_DRIVER:
    case DLX_E_FORKED:
    case DLX_E_DRIVER:
      return "BufferError";
    default:
      return "ValueError";
  }
}

/* Fresh memory for a tensor like the prototype. Its device, dtype, ndim and shape are read, and
 * nothing else of it.
 * Owns: the caller owns *out. GIL: not needed. Errors: -1, *out NULL, SetError called once. */
static int allocate(DLTensor* prototype, DLManagedTensorVersioned** out, void* error_ctx,
                    void (*SetError)(void* error_ctx, const char* kind, const char* message)) {
  char device[96];
  int status = DLX_E_DEVICE;
  const char* message = device;
  DLDevice where = prototype->device;
  DLTensor like = {
      .data = prototype, /* any address: a tensor with elements has one */
      .device = {kDLCPU, 0},
      .ndim = prototype->ndim,
      .dtype = prototype->dtype,
      .shape = prototype->shape,
  };
  *out = NULL;
  if (where.device_type == kDLCPU) {
    status = dlx_managed_empty(&like, 0, 0, out);
    message = dlx_status_text(status);
  } else if (where.device_type == kDLCUDA) {
    /* Callers may hold the GIL, which nobody needs while the driver allocates. */
    PyThreadState* state = py_holds_gil() ? PyEval_SaveThread() : NULL;
    status = dlx_cuda_empty(&like, 0, 0, where.device_id, out);
    if (state) PyEval_RestoreThread(state);
    message = status <= DLX_E_NO_DRIVER ? dlx_cuda_message() : dlx_status_text(status);
  } else {
    snprintf(device, sizeof device,
             "dlx allocates on the host and on CUDA, asked for device (%d, %d)", where.device_type,
             where.device_id);
  }
  if (status == DLX_OK) return 0;
  if (SetError) SetError(error_ctx, kind_of(status), message);
  return -1;
}

/* Owns: the caller owns *out, which keeps the memory alive by itself. GIL: needed.
 * Errors: -1 with an exception. */
static int to_managed(void* tensor, DLManagedTensorVersioned** out) {
  DLManagedTensorVersioned* m = py_tensor_managed(tensor);
  *out = NULL;
  if (m == NULL) return -1;
  if (dlx_is_cuda(m->dl_tensor.device)) {
    if (py_cuda_to_own_stream((TensorObject*)tensor) < 0) return -1;
    m = py_tensor_managed(tensor); /* another one, unless it was moved before */
    if (m == NULL) return -1;
  }
  uint64_t flags = m->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
  int status = dlx_managed_export(m, m->dl_tensor.device, flags, out);
  if (status == DLX_OK) return 0;
  py_raise(status, NULL);
  return -1;
}

/* Owns: on success the new dlx.Tensor owns `managed`, and the caller owns that; on failure the
 * caller still owns `managed`, untouched. GIL: needed. Errors: -1 with an exception. */
static int from_managed(DLManagedTensorVersioned* managed, void** out) {
  *out = NULL;
  TensorObject* tensor = py_tensor_alloc(); /* first, so that nothing fails after the taking */
  if (tensor == NULL) return -1;
  if (managed->version.major == DLX_DLPACK_MAJOR && dlx_is_cuda(managed->dl_tensor.device) &&
      py_cuda_ready_here(tensor, managed->dl_tensor.device.device_id) < 0) {
    Py_DECREF(tensor);
    return -1;
  }
  int status = dlx_managed_adopt(managed, &tensor->managed);
  if (status == DLX_OK) { /* the flag describes a hand-over, not the memory */
    tensor->managed->flags &= ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
    *out = tensor;
    return 0;
  }
  if (status == DLX_E_VERSION) {
    py_raise(status, "the tensor speaks DLPack %u.%u, dlx reads 1.x", managed->version.major,
             managed->version.minor);
  } else {
    py_raise(status, NULL);
  }
  Py_DECREF(tensor);
  return -1;
}

/* Borrow: a DLTensor of memory that the dlx.Tensor keeps. It has no flags, so read-only memory
 * would seem writable: it is refused.
 * Owns: nothing; *out is good while the dlx.Tensor lives. GIL: needed. Errors: -1 with an
 * exception. */
static int borrow(void* tensor, DLTensor* out) {
  const DLManagedTensorVersioned* m = py_tensor_managed(tensor);
  if (m == NULL) return -1;
  if (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) {
    py_raise(DLX_E_READONLY, "a borrowed DLTensor cannot say that memory is read-only");
    return -1;
  }
  if (dlx_is_cuda(m->dl_tensor.device)) {
    if (py_cuda_to_own_stream((TensorObject*)tensor) < 0) return -1;
    m = py_tensor_managed(tensor);
    if (m == NULL) return -1;
  }
  *out = m->dl_tensor;
  return 0;
}

/* Host memory has no stream; on CUDA there is dlx's own.
 * Owns: nothing. GIL: needed. Errors: -1 with an exception. */
static int work_stream(int32_t device_type, int32_t device_id, void** out) {
  *out = NULL;
  if (dlx_host_readable(device_type)) return 0;
  if (dlx_is_cuda((DLDevice){device_type, device_id})) {
    uint64_t stream;
    if (py_cuda_work_stream(device_id, &stream) < 0) return -1;
    *out = (void*)(uintptr_t)stream;
    return 0;
  }
  py_raise(DLX_E_DEVICE, "dlx has no work stream on device (%d, %d)", device_type, device_id);
  return -1;
}

const DLPackExchangeAPI py_tensor_table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}, .prev_api = NULL},
    .managed_tensor_allocator = allocate,
    .managed_tensor_from_py_object_no_sync = to_managed,
    .managed_tensor_to_py_object_no_sync = from_managed,
    .dltensor_from_py_object_no_sync = borrow,
    .current_work_stream = work_stream,
};

int py_table_publish(PyTypeObject* type) {
  PyObject* capsule = PyCapsule_New((void*)&py_tensor_table, "dlpack_exchange_api", NULL);
  if (capsule == NULL) return -1;
  /* Into the dict: the type is immutable from its birth. */
  int failed = PyDict_SetItemString(type->tp_dict, "__dlpack_c_exchange_api__", capsule);
  Py_DECREF(capsule);
  if (!failed) PyType_Modified(type);
  return failed;
}
