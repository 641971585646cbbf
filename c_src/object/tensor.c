/* dlx.Tensor, the object that exports capsules to any consumer: one holder of a managed tensor of
 * dlx, which has copies of the producer's shape and strides. */

#include "tensor.h"
#include "base/gil.h"
#include "base/threads.h"

#include <stddef.h>

#ifdef Py_GIL_DISABLED
static int release_in_main(void* object) {
  Py_DECREF((PyObject*)object);
  return 0;
}
#endif

void py_release_object(void* object) {
  int held = py_holds_gil(); /* the usual case, and much cheaper than taking it */
#ifdef Py_GIL_DISABLED
  /* Another interpreter cannot run the destructor. Without room for the call, the object leaks. */
  if (held && PyInterpreterState_Get() != PyInterpreterState_Main()) {
    Py_AddPendingCall(release_in_main, object);
    return;
  }
#endif
  PyGILState_STATE state = PyGILState_LOCKED;
  /* Without a running interpreter, leaking is the only safe option. */
  if (held ? !Py_IsInitialized() : !py_gil_take(&state)) return;
  if (py_is_held(object)) /* frees nothing, so it runs no Python */
    Py_DECREF((PyObject*)object);
  else
    py_drop(object);
  if (!held) PyGILState_Release(state);
}

PyTypeObject py_tensor_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dlx.Tensor",
    .tp_basicsize = sizeof(TensorObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_weaklistoffset = offsetof(TensorObject, weakrefs),
    .tp_dealloc = py_tensor_dealloc,
    .tp_traverse = py_tensor_traverse,
    .tp_clear = py_tensor_clear,
};

TensorObject* py_tensor_alloc(void) {
  TensorObject* tensor = PyObject_GC_New(TensorObject, &py_tensor_type);
  if (tensor == NULL) return NULL;
  tensor->managed = NULL;
  tensor->weakrefs = NULL;
  tensor->ready = NULL;
  tensor->is_ordered = tensor->is_on_own_stream = 0;
  return tensor;
}

/* Return the Python object that only this tensor keeps alive. If other tensors share the memory,
 * the collector cannot see them: NULL. Owns: borrowed. */
static inline PyObject* find_sole_owner(const TensorObject* tensor) {
  const DLManagedTensorVersioned* made = tensor->managed;
  return made && dlx_managed_is_sole(made) ? dlx_managed_owner(made, py_release_object) : NULL;
}

/* GIL: held, so no holder can be added; a concurrent release is harmless. */
int py_tensor_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(find_sole_owner((TensorObject*)self));
  return 0;
}

/* Called for an unreachable cycle, whose objects may still use this one and get an error. */
int py_tensor_clear(PyObject* self) {
  DLManagedTensorVersioned* made = ((TensorObject*)self)->managed;
  ((TensorObject*)self)->managed = NULL;
  if (made) dlx_managed_release(made);
  return 0;
}

DLManagedTensorVersioned* py_tensor_managed(PyObject* obj) {
  if (!PyObject_TypeCheck(obj, &py_tensor_type)) {
    PyErr_Format(PyExc_TypeError, "expected dlx.Tensor, found %.200s", Py_TYPE(obj)->tp_name);
    return NULL;
  }
  DLManagedTensorVersioned* made = py_tensor_inside((TensorObject*)obj);
  if (made == NULL)
    py_raise(DLX_E_CONSUMED, "this dlx.Tensor was consumed, or cleared by the garbage collector");
  return made;
}

void py_tensor_dealloc(PyObject* self) {
  TensorObject* tensor = (TensorObject*)self;
  PyObject_GC_UnTrack(self);
  if (tensor->weakrefs) PyObject_ClearWeakRefs(self);
  if (tensor->managed) {
    PyObject* owner = find_sole_owner(tensor);
    if (owner && py_is_held(owner)) {
      dlx_managed_own(tensor->managed, NULL, NULL);
      dlx_managed_release(tensor->managed);
      Py_DECREF(owner);
    } else {
      py_managed_release(tensor->managed);
    }
  }
  if (tensor->ready) dlx_ready_drop(tensor->ready);
  PyObject_GC_Del(self);
}

PyObject* py_tensor_wrap(DLManagedTensorVersioned* made) {
  TensorObject* tensor = py_tensor_alloc();
  if (tensor == NULL) {
    dlx_managed_release(made);
    return NULL;
  }
  tensor->managed = made;
  /* Only an owner that the collector tracks can be part of a cycle. */
  PyObject* owner = find_sole_owner(tensor);
  if (owner && PyObject_IS_GC(owner)) PyObject_GC_Track(tensor);
  return (PyObject*)tensor;
}

PyObject* py_tensor_result(int status, DLManagedTensorVersioned* made) {
  return status == DLX_OK ? py_tensor_wrap(made) : py_raise(status, NULL);
}

void py_managed_release(DLManagedTensorVersioned* made) {
  py_pending pending = py_pending_save();
  dlx_managed_release(made);
  py_pending_restore(pending);
}

dlx_ready* py_tensor_ready(TensorObject* tensor) {
  dlx_ready* ready;
  PY_LOCKED(tensor)
  ready = tensor->ready ? dlx_ready_hold(tensor->ready) : NULL;
  PY_UNLOCKED()
  return ready;
}

void py_tensor_follow(TensorObject* view, TensorObject* tensor,
                      const DLManagedTensorVersioned* base) {
  PY_LOCKED(tensor)
  view->ready = tensor->ready ? dlx_ready_hold(tensor->ready) : NULL;
  view->is_ordered = tensor->is_ordered;
  /* Memory exported before the tensor moved to dlx's own stream is not released in its order. */
  view->is_on_own_stream = tensor->is_on_own_stream && tensor->managed == base;
  PY_UNLOCKED()
}
