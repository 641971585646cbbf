/* dlx.Tensor's DLPack interface: capsules for any consumer, and an exchange table for C programs,
 * which create, import and borrow dlx.Tensor objects without capsules. Functions need the GIL, and
 * return NULL or -1 with an exception, unless they say otherwise.
 *
 * The table's slots do not synchronize with the caller. Device memory is ready on dlx's own stream,
 * which current_work_stream returns: exported memory is ready on that stream, and imported memory
 * must be ready there. */

#include "interop/interop.h"
#include "base/gil.h"

#include <stdio.h>

/* ---- capsules -------------------------------------------------------------------------------- */

/* Returns 0 for a legacy capsule, 1 for a versioned one. */
static int wants_versioned(PyObject* max_version) {
  if (max_version == Py_None) return 0;
  if (!PyTuple_Check(max_version) || PyTuple_GET_SIZE(max_version) != 2) {
    PyErr_SetString(PyExc_TypeError, "max_version must be None or a tuple (major, minor)");
    return -1;
  }
  long major = PyLong_AsLong(PyTuple_GET_ITEM(max_version, 0));
  if (major == -1 && PyErr_Occurred()) return -1;
  return major >= 1;
}

/* Check the requested stream and device; set `device` to the capsule's device. Any kind of host
 * memory can be exported as CPU memory. */
static int check_request(PyObject* stream, PyObject* dl_device, DLDevice* device) {
  if (stream != Py_None && dlx_host_readable(device->device_type)) {
    int is_too_big = 0;
    long value = PyLong_Check(stream) ? PyLong_AsLongAndOverflow(stream, &is_too_big) : 0;
    if (value != -1 || is_too_big) {
      py_raise(DLX_E_STREAM, "host memory has no stream, found stream=%R", stream);
      return -1;
    }
  }
  if (dl_device == Py_None) return 0;
  DLDevice wanted;
  if (py_read_device(dl_device, &wanted) < 0) return -1;
  int same = wanted.device_type == device->device_type && wanted.device_id == device->device_id;
  int to_host = wanted.device_type == kDLCPU &&
                (dlx_host_readable(device->device_type) || dlx_is_cuda(*device));
  if (!same && !to_host) {
    py_raise(DLX_E_DEVICE,
             "cannot export this dlx.Tensor to device (%d, %d): it is on device (%d, %d). "
             "Leave dl_device out.",
             wanted.device_type, wanted.device_id, device->device_type, device->device_id);
    return -1;
  }
  *device = wanted;
  return 0;
}

enum { STREAM, MAX_VERSION, DL_DEVICE, COPY, KEYWORDS };

/* Return the number of a keyword, or KEYWORDS. Names are interned: compare pointers first. */
static int find_keyword(PyObject* name) {
  PyObject* const known[KEYWORDS] = {py_name_stream, py_name_max_version, py_name_dl_device,
                                     py_name_copy};
  for (int k = 0; k < KEYWORDS; k++) {
    if (name == known[k]) return k;
  }
  int k = 0;
  while (k < KEYWORDS && PyUnicode_Compare(name, known[k]) != 0) k++;
  return k;
}

PyObject* py_tensor_dlpack(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                           PyObject* names) {
  PyObject* value[KEYWORDS] = {Py_None, Py_None, Py_None, Py_None};
  if (nargs != 0) return PyErr_Format(PyExc_TypeError, "__dlpack__ takes keyword arguments only");
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    int k = find_keyword(name);
    if (k == KEYWORDS) {
      PyErr_Format(PyExc_TypeError, "__dlpack__() got an unexpected keyword argument '%U'", name);
      return NULL;
    }
    value[k] = args[i];
  }
  DLManagedTensorVersioned *base = py_tensor_managed(self), *made;
  if (base == NULL) return NULL;
  DLDevice device = base->dl_tensor.device;
  int versioned = wants_versioned(value[MAX_VERSION]);
  if (versioned < 0 || check_request(value[STREAM], value[DL_DEVICE], &device) < 0) return NULL;
  if (!versioned && (base->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) &&
      dlx_itemsize(base->dl_tensor.dtype, 0) == 0)
    return py_raise(
        DLX_E_FLAGS,
        "cannot export padded elements in a legacy capsule, which has no flag for them. "
        "Pass max_version=(1, 0).");
  int copied = value[COPY] == Py_None ? 0 : PyObject_IsTrue(value[COPY]);
  if (copied < 0) return NULL;
  int is_cuda = dlx_is_cuda(base->dl_tensor.device);
  if (is_cuda && device.device_type == kDLCPU) {
    if (value[COPY] != Py_None && !copied)
      return py_raise(DLX_E_COPY, "device memory cannot be exported to the host without a copy");
    copied = 1;
  } else if (copied && value[DL_DEVICE] != Py_None && device.device_type != kDLCPU) {
    return py_raise(DLX_E_DEVICE,
                    "cannot copy to device (%d, %d): __dlpack__ copies to host memory only. "
                    "Leave dl_device out.",
                    device.device_type, device.device_id);
  }
  if (copied) {
    made = is_cuda ? py_cuda_fetch((TensorObject*)self) : py_managed_copy(base, NULL, 1, 0);
    if (made == NULL) return NULL;
    made->flags |= DLPACK_FLAG_BITMASK_IS_COPIED;
  } else {
    if (!versioned && (base->flags & DLPACK_FLAG_BITMASK_READ_ONLY) &&
        dlx_nbytes(&base->dl_tensor, base->flags) > 0) /* memory without bytes cannot be written */
      return py_raise(
          DLX_E_READONLY,
          "cannot export read-only memory in a legacy capsule, which has no flag for it. "
          "Pass max_version=(1, 0).");
    uint64_t flags = base->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
    int status = dlx_managed_share(base, NULL, flags, &made);
    if (status != DLX_OK) return py_raise(status, NULL);
    made->dl_tensor.device = device;
    if (is_cuda) made = py_cuda_export((TensorObject*)self, made, value[STREAM]);
    if (made == NULL) return NULL;
  }
  return py_capsule_wrap(made, !versioned);
}

PyObject* py_tensor_dlpack_device(PyObject* self, PyObject* unused) {
  const DLManagedTensorVersioned* m = py_tensor_managed(self);
  if (m == NULL) return NULL;
  DLDevice device = m->dl_tensor.device;
  return py_new_tuple((const int64_t[]){device.device_type, device.device_id}, 2);
}

/* ---- the exchange table ---------------------------------------------------------------------- */

/* GIL: not needed. */
static const char* name_exception(int status) {
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

/* Allocate memory for the device, dtype, ndim and shape of `prototype`. Owns: the caller owns *out.
 * GIL: not needed. Errors: -1, *out is NULL, SetError is called once. */
static int allocate(DLTensor* prototype, DLManagedTensorVersioned** out, void* error_ctx,
                    void (*SetError)(void* error_ctx, const char* kind, const char* message)) {
  char device[96];
  int status = DLX_E_DEVICE;
  const char* message = device;
  DLDevice where = prototype->device;
  *out = NULL;
  if (where.device_type == kDLCPU) {
    status = dlx_managed_empty(prototype, 0, 0, out);
    message = dlx_status_text(status);
  } else if (where.device_type == kDLCUDA) {
    /* The caller may hold the GIL; release it while the driver allocates. */
    PyThreadState* state = py_holds_gil() ? PyEval_SaveThread() : NULL;
    status = dlx_cuda_empty(prototype, 0, 0, where.device_id, 0, out);
    if (state) PyEval_RestoreThread(state);
    message = status <= DLX_E_NO_DRIVER ? dlx_cuda_message() : dlx_status_text(status);
  } else {
    snprintf(device, sizeof device,
             "cannot allocate on device (%d, %d): dlx supports the host and CUDA",
             where.device_type, where.device_id);
  }
  if (status == DLX_OK) return 0;
  if (SetError) SetError(error_ctx, name_exception(status), message);
  return -1;
}

/* Order a tensor's device memory on dlx's own stream; return its managed tensor. */
static DLManagedTensorVersioned* move_to_own_stream(void* tensor) {
  DLManagedTensorVersioned* m = py_tensor_managed(tensor);
  if (m == NULL || !dlx_is_cuda(m->dl_tensor.device)) return m;
  return py_cuda_to_own_stream((TensorObject*)tensor) < 0 ? NULL : py_tensor_managed(tensor);
}

/* Owns: the caller owns *out, which keeps the memory alive. */
static int export_managed(void* tensor, DLManagedTensorVersioned** out) {
  DLManagedTensorVersioned* m = move_to_own_stream(tensor);
  *out = NULL;
  if (m == NULL) return -1;
  uint64_t flags = m->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
  return py_check(dlx_managed_share(m, NULL, flags, out));
}

/* Owns: the caller owns *out, which owns `managed`; on failure the caller still owns `managed`. */
static int import_managed(DLManagedTensorVersioned* managed, void** out) {
  *out = NULL;
  TensorObject* tensor = py_tensor_alloc(); /* allocate before taking `managed` */
  if (tensor == NULL) return -1;
  if (managed->version.major == DLX_DLPACK_MAJOR && dlx_is_cuda(managed->dl_tensor.device) &&
      py_cuda_set_ready(tensor, managed->dl_tensor.device.device_id, 0, NULL) < 0) {
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
    py_raise(status, "the tensor uses DLPack %u.%u, dlx supports 1.x", managed->version.major,
             managed->version.minor);
  } else {
    py_raise(status, NULL);
  }
  Py_DECREF(tensor);
  return -1;
}

/* Borrow a DLTensor. It has no flags, so read-only memory would seem writable. Owns: nothing; *out
 * is valid while the dlx.Tensor lives. */
static int borrow(void* tensor, DLTensor* out) {
  const DLManagedTensorVersioned* m = py_tensor_managed(tensor);
  if (m && m->flags & DLPACK_FLAG_BITMASK_READ_ONLY) {
    py_raise(DLX_E_READONLY, "cannot borrow read-only memory: a DLTensor has no read-only flag");
    return -1;
  }
  if (m) m = move_to_own_stream(tensor);
  if (m == NULL) return -1;
  *out = m->dl_tensor;
  return 0;
}

/* Get dlx's own stream; NULL for host memory. */
static int get_work_stream(int32_t device_type, int32_t device_id, void** out) {
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
    .managed_tensor_from_py_object_no_sync = export_managed,
    .managed_tensor_to_py_object_no_sync = import_managed,
    .dltensor_from_py_object_no_sync = borrow,
    .current_work_stream = get_work_stream,
};
