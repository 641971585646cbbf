/* Producers: objects with `__dlpack__` whose type no adapter lists. This asks the same as the
 * Python path, in the same order: dtype, device, capsule. A producer is called once; if its capsule
 * is not used, or it raised, the offer has the response. */

#include "target.h"

/* Whether the dtype can be numeric; a numeric dtype is remembered. */
static int may_be_numbers(py_producer* p, PyObject* obj) {
  PyObject* dtype;
  if (py_get_optional(obj, py_name_dtype, &dtype) < 0) return py_error_forget() == 0;
  if (dtype == NULL) return 1;
  int is_known = dtype == atomic_load_explicit(&p->number, memory_order_relaxed);
  PyObject* why = is_known ? NULL : PyObject_CallOneArg(p->no_numbers, dtype);
  if (why) {
    is_known = PyUnicode_Check(why) && PyUnicode_GET_LENGTH(why) == 0;
    if (is_known)
      Py_XDECREF(atomic_exchange_explicit(&p->number, Py_NewRef(dtype), memory_order_acq_rel));
  }
  Py_XDECREF(why);
  Py_DECREF(dtype);
  if (PyErr_Occurred()) py_error_forget();
  return is_known;
}

static int is_number(PyObject* obj, long wanted) {
  return PyLong_Check(obj) && !PyBool_Check(obj) && PyLong_AsLong(obj) == wanted;
}

/* Whether __dlpack_device__ is missing, or returns the host. */
static int may_be_on_host(PyObject* obj) {
  PyTypeObject* type = Py_TYPE(obj);
  PyObject* ask = NULL;
#ifndef Py_GIL_DISABLED /* _PyType_Lookup returns a borrowed reference */
  if (Py_IS_TYPE((PyObject*)type, &PyType_Type)) ask = _PyType_Lookup(type, py_name_dlpack_device);
#endif
  if (ask && PyFunction_Check(ask)) { /* not changed by a descriptor */
    Py_INCREF(ask);
  } else if (py_get_optional((PyObject*)type, py_name_dlpack_device, &ask) < 0) {
    return py_error_forget(), 0;
  }
  if (ask == NULL) return 1;
  PyObject* answer = PyObject_CallOneArg(ask, obj);
  Py_DECREF(ask);
  int is_host = answer && PyTuple_CheckExact(answer) && PyTuple_GET_SIZE(answer) == 2 &&
                is_number(PyTuple_GET_ITEM(answer, 0), kDLCPU) &&
                is_number(PyTuple_GET_ITEM(answer, 1), 0);
  Py_XDECREF(answer);
  if (PyErr_Occurred()) py_error_forget();
  return is_host;
}

/* Call __dlpack__. Owns: out->response is its result, or its exception if out->state = PY_RAISED.
 * Errors: NULL with an exception that ends the call. */
static void call_producer(const py_producer* p, PyObject* obj, py_offer* out) {
  Py_ssize_t n = PyTuple_GET_SIZE(p->values);
  PyObject* arguments[1 + DLX_MAX_KEYWORDS] = {obj};
  for (Py_ssize_t i = 0; i < n; i++) arguments[1 + i] = PyTuple_GET_ITEM(p->values, i);
  out->response = PyObject_VectorcallMethod(py_name_dlpack, arguments, 1, p->names);
  if (out->response) return;
  out->response = py_error_take();
  out->state = PY_RAISED;
}

void py_take_capsule(py_source* s, py_target* t, PyObject* obj, unsigned options, py_offer* out) {
  if (py_call_has_response(obj)) return; /* a nested call in the Python path */
  if (!may_be_numbers(&s->producer, obj) || !may_be_on_host(obj)) return;
  call_producer(&s->producer, obj, out);
  if (out->response == NULL || out->state == PY_RAISED) return;
  DLManagedTensorVersioned* made = py_capsule_take(out->response);
  if (made == NULL) return;
  if (made->dl_tensor.device.device_id == 0 && py_offer_checks(s, t, made, options, out)) {
    out->made = made;
    return;
  }
  py_capsule_give_back(out->response, made);
  out->state = PY_ASK;
}
