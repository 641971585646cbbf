/* Stream order of dlx.Tensor on CUDA devices: when memory is ready, and when it can be released. */

#include "interop.h"
#include "base/threads.h"

#define UNORDERED UINT64_MAX

/* Read the stream argument of __dlpack__; None is the legacy stream (array API standard). */
static int read_stream(PyObject* value, uint64_t* stream) {
  *stream = DLX_STREAM_LEGACY;
  if (value == Py_None) return 0;
  int is_too_big = 0;
  long long number = PyLong_Check(value) && !PyBool_Check(value)
                         ? PyLong_AsLongLongAndOverflow(value, &is_too_big)
                         : 0;
  if (is_too_big) number = 0;
  if (number < -1 || number == 0) {
    py_raise(DLX_E_STREAM,
             "stream must be None, -1, 1 (legacy), 2 (per-thread) or a handle, found %R", value);
    return -1;
  }
  *stream = number == -1 ? UNORDERED : (uint64_t)number;
  return 0;
}

/* Make a stream, or the host (stream 0), wait for a tensor's memory. */
static int wait_ready(TensorObject* tensor, int32_t device_id, uint64_t stream) {
  dlx_ready* ready = py_tensor_ready(tensor);
  if (ready == NULL) return 0;
  int status;
  Py_BEGIN_ALLOW_THREADS
    status = stream ? dlx_ready_wait(ready, device_id, stream) : dlx_ready_synchronize(ready);
    dlx_ready_drop(ready);
  Py_END_ALLOW_THREADS
  return py_check(status);
}

int py_cuda_work_stream(int32_t device_id, uint64_t* stream) {
  int status = DLX_OK;
  *stream = dlx_cuda_known_stream(device_id);
  if (*stream == 0) PY_WITHOUT_GIL(status = dlx_cuda_work_stream(device_id, stream));
  return py_check(status);
}

DLManagedTensorVersioned* py_cuda_release_behind(DLManagedTensorVersioned* made, int32_t device_id,
                                                 uint64_t stream, PyObject* keep) {
  DLManagedTensorVersioned* used;
  void* use;
  /* The first use of a device creates its context. */
  PyThreadState* state = dlx_cuda_entered(device_id) ? NULL : PyEval_SaveThread();
  int status =
      dlx_use_new(device_id, stream, made, dlx_managed_release, keep, py_release_object, &use);
  if (state) PyEval_RestoreThread(state);
  if (status == DLX_OK) {
    status = dlx_managed_new(&made->dl_tensor, made->flags, use, dlx_use_release, &used);
    if (status == DLX_OK) return used;
    dlx_use_release(use);
  } else {
    Py_XDECREF(keep);
    dlx_managed_release(made);
  }
  return (DLManagedTensorVersioned*)py_raise(status, NULL);
}

int py_cuda_can_order(void) {
  int status = DLX_OK;
  if (!dlx_cuda_loaded()) PY_WITHOUT_GIL(status = dlx_cuda_load());
  return status == DLX_OK;
}

/* Find the object that keeps a stream alive, or NULL. Owns: *out is a new reference. Errors: -1
 * with an exception if py_error_forget does not clear it. */
static int find_keeper(int32_t device_id, uint64_t stream, PyObject** out) {
  *out = NULL;
  if (py_hooks.stream_keeper == NULL || stream <= DLX_STREAM_PER_THREAD) return 0;
  PyObject* keep =
      PyObject_CallFunction(py_hooks.stream_keeper, "iK", device_id, (unsigned long long)stream);
  if (keep == NULL) return py_error_forget();
  if (keep == Py_None) Py_CLEAR(keep);
  *out = keep;
  return 0;
}

DLManagedTensorVersioned* py_cuda_export(TensorObject* tensor, DLManagedTensorVersioned* made,
                                         PyObject* value) {
  uint64_t stream;
  int is_ordered;
  DLDevice device = made->dl_tensor.device;
  if (read_stream(value, &stream) < 0) goto failed;
  PY_LOCKED(tensor)
  is_ordered = tensor->is_ordered;
  PY_UNLOCKED()
  if (is_ordered || stream == UNORDERED || dlx_size(&made->dl_tensor) == 0) return made;
  if (wait_ready(tensor, device.device_id, stream) < 0) goto failed;
  /* A consumer that names no stream may read managed memory on the host next. */
  if (value == Py_None && device.device_type == kDLCUDAManaged &&
      wait_ready(tensor, device.device_id, 0) < 0)
    goto failed;
  if (!py_cuda_can_order()) return made; /* no driver: the address came from the user */
  PyObject* keep;
  if (find_keeper(device.device_id, stream, &keep) < 0) goto failed;
  return py_cuda_release_behind(made, device.device_id, stream, keep);
failed:
  dlx_managed_release(made);
  return NULL;
}

DLManagedTensorVersioned* py_cuda_fetch(TensorObject* tensor) {
  uint64_t stream;
  DLManagedTensorVersioned* from = py_tensor_managed((PyObject*)tensor);
  if (from == NULL) return NULL;
  int32_t device_id = from->dl_tensor.device.device_id;
  if (py_cuda_work_stream(device_id, &stream) < 0 || wait_ready(tensor, device_id, 0) < 0)
    return NULL;
  from = py_tensor_managed((PyObject*)tensor); /* the GIL was released: it may have changed */
  return from ? py_managed_copy(from, NULL, 1, stream) : NULL;
}

int py_cuda_to_own_stream(TensorObject* tensor) {
  DLManagedTensorVersioned *before = py_tensor_managed((PyObject*)tensor), *share = NULL, *used;
  dlx_ready *ready, *later;
  uint64_t stream;
  int is_moved, is_ready, status = DLX_OK;
  if (before == NULL) return -1;
  PY_LOCKED(tensor)
  is_moved = tensor->is_on_own_stream;
  is_ready = tensor->ready == NULL;
  PY_UNLOCKED()
  if (is_moved || (is_ready && !py_cuda_can_order())) return 0;
  int32_t device_id = before->dl_tensor.device.device_id;
  if (py_cuda_work_stream(device_id, &stream) < 0 || wait_ready(tensor, device_id, stream) < 0)
    return -1;
  PY_LOCKED(tensor)
  before = tensor->managed; /* the GIL was released: it may have changed */
  if (before) status = dlx_managed_share(before, NULL, before->flags, &share);
  PY_UNLOCKED()
  if (before == NULL) return py_tensor_managed((PyObject*)tensor), -1; /* its exception */
  if (py_check(status) < 0) return -1;
  used = py_cuda_release_behind(share, device_id, stream, NULL); /* keeps `before` alive */
  if (used == NULL) return -1;
  if (py_check(dlx_ready_new(device_id, 0, NULL, NULL, &later)) < 0) {
    dlx_managed_release(used);
    return -1;
  }
  PY_LOCKED(tensor)
  is_moved = tensor->is_on_own_stream || tensor->managed != before; /* by another thread */
  ready = is_moved ? later : tensor->ready;
  if (!is_moved) {
    atomic_store_explicit((_Atomic(DLManagedTensorVersioned*)*)&tensor->managed, used,
                          memory_order_release); /* see py_tensor_inside */
    tensor->ready = later;
    tensor->is_ordered = 0;
    tensor->is_on_own_stream = 1;
  }
  PY_UNLOCKED()
  if (ready) dlx_ready_drop(ready);
  dlx_managed_release(is_moved ? used : before);
  return is_moved ? py_cuda_to_own_stream(tensor) : 0;
}

int py_cuda_new_ready(int32_t device_id, uint64_t stream, PyObject* keep, dlx_ready** out) {
  int status;
  Py_XINCREF(keep);
  PY_WITHOUT_GIL(status = dlx_ready_new(device_id, stream, keep, py_release_object, out));
  if (status != DLX_OK) Py_XDECREF(keep);
  return status;
}

int py_cuda_set_ready(TensorObject* tensor, int32_t device_id, uint64_t stream, PyObject* keep) {
  dlx_ready* ready;
  if (!py_cuda_can_order()) return 0; /* no driver, no stream */
  if (py_check(py_cuda_new_ready(device_id, stream, keep, &ready)) < 0) return -1;
  if (tensor->ready) dlx_ready_drop(tensor->ready);
  tensor->ready = ready;
  return 0;
}

PyObject* py_cuda_new(const DLTensor* like, uint64_t flags, int keep_order, int32_t device_id,
                      uint64_t stream, PyObject* keep) {
  DLManagedTensorVersioned* made;
  int status;
  PY_WITHOUT_GIL(status = dlx_cuda_empty(like, flags, keep_order, device_id, stream, &made));
  if (status != DLX_OK) return py_raise(status, NULL);
  /* dlx's own stream frees it in its order */
  if (stream && stream != dlx_cuda_known_stream(device_id) && dlx_size(&made->dl_tensor))
    made = py_cuda_release_behind(made, device_id, stream, Py_XNewRef(keep));
  PyObject* tensor = made ? py_tensor_wrap(made) : NULL;
  if (tensor && !stream && py_cuda_set_ready((TensorObject*)tensor, device_id, 0, NULL) < 0)
    Py_CLEAR(tensor);
  return tensor;
}

/* ---- builtins -------------------------------------------------------------------------------- */

PY_DOC(ready_new,
       "Return the address of a dlx_ready for the work that is on a stream now. `keep` (or None) "
       "keeps the stream alive; the caller owes dlx_ready_drop.");
static PyObject* ready_new(PyObject* module, PyObject* args) {
  PyObject* keep;
  int device_id;
  unsigned long long stream;
  dlx_ready* ready;
  if (!PyArg_ParseTuple(args, "iKO:ready_new", &device_id, &stream, &keep)) return NULL;
  int status = py_cuda_new_ready(device_id, stream, keep == Py_None ? NULL : keep, &ready);
  return status == DLX_OK ? PyLong_FromVoidPtr(ready) : py_raise(status, NULL);
}

PY_DOC(tensor_readiness,
       "Return the address of a tensor's dlx_ready, or 0; the caller owes dlx_ready_drop.");
static PyObject* tensor_readiness(PyObject* module, PyObject* tensor) {
  if (py_tensor_managed(tensor) == NULL) return NULL;
  return PyLong_FromVoidPtr(py_tensor_ready((TensorObject*)tensor));
}

PY_DOC(tensor_behind,
       "Return a dlx.Tensor of the same memory, ready with the dlx_ready at an address (0 = now). "
       "Its release waits for a consumer's stream (0, -1 = none), which `keep` (or None) keeps "
       "alive; if the memory is ready now, a stream other than 0 already waits for it.");
static PyObject* tensor_behind(PyObject* module, PyObject* args) {
  PyObject *tensor, *keep;
  int device_id;
  long long stream;
  unsigned long long address = 0;
  DLManagedTensorVersioned *base, *made;
  if (!PyArg_ParseTuple(args, "OiLO|K:tensor_behind", &tensor, &device_id, &stream, &keep,
                        &address) ||
      (base = py_tensor_managed(tensor)) == NULL)
    return NULL;
  int status = dlx_managed_share(base, NULL, base->flags, &made);
  if (status != DLX_OK) return py_raise(status, NULL);
  if (stream > 0 && dlx_size(&made->dl_tensor) > 0)
    made = py_cuda_release_behind(made, device_id, (uint64_t)stream,
                                  keep == Py_None ? NULL : Py_NewRef(keep));
  TensorObject* view = made ? (TensorObject*)py_tensor_wrap(made) : NULL;
  if (view && address) view->ready = dlx_ready_hold((dlx_ready*)(uintptr_t)address);
  if (view) view->is_ordered = stream && address == 0;
  return (PyObject*)view;
}

PY_DOC(tensor_on_device,
       "Return a dlx.Tensor of new device memory like another, ready on dlx's stream, or allocated "
       "for a copy on another stream, which its release waits for; `keep` keeps that alive.");
static PyObject* tensor_on_device(PyObject* module, PyObject* args) {
  PyObject *like, *keep = Py_None;
  int keep_order, device_id;
  unsigned long long stream = 0;
  if (!PyArg_ParseTuple(args, "Opi|KO:tensor_on_device", &like, &keep_order, &device_id, &stream,
                        &keep))
    return NULL;
  DLManagedTensorVersioned* m = py_tensor_managed(like);
  if (m == NULL) return NULL;
  dlx_managed_hold(m); /* another thread may drop the last reference to the tensor */
  PyObject* made = py_cuda_new(&m->dl_tensor, py_fresh_flags(m), keep_order, device_id, stream,
                               keep == Py_None ? NULL : keep);
  py_managed_release(m);
  return made;
}

PyMethodDef py_cuda_functions[] = {
    PY_VARARGS(ready_new),
    PY_ONE(tensor_readiness),
    PY_VARARGS(tensor_behind),
    PY_VARARGS(tensor_on_device),
    PY_END,
};
