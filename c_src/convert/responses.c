/* Responses of producers that the fast path could not use, for the Python path of the same call:
 * see call.h. */

#include "call.h"
#include "core/thread_state.h"
#include "base/threads.h"

/* The responses for the Python path that runs on this thread. */
static DLX_FEW_WORDS PyObject* present;

void py_call_keep_response(py_call* call, PyObject* obj, PyObject* answer, int is_raised) {
  if (call->responses == NULL) call->responses = PyDict_New();
  PyObject* address = call->responses ? PyLong_FromVoidPtr(obj) : NULL;
  PyObject* entry =
      address ? PyTuple_Pack(3, obj, is_raised ? Py_None : answer, is_raised ? answer : Py_None)
              : NULL;
  if (entry == NULL || PyDict_SetItem(call->responses, address, entry) < 0) {
    py_pending pending = py_pending_save(); /* capsules may be freed */
    Py_CLEAR(call->responses);
    py_pending_restore(pending);
  }
  Py_XDECREF(entry);
  Py_XDECREF(address);
}

int py_call_has_response(PyObject* obj) {
  if (present == NULL) return 0;
  PyObject* address = PyLong_FromVoidPtr(obj);
  int found = address ? PyDict_Contains(present, address) : -1;
  Py_XDECREF(address);
  return found != 0;
}

PyObject* py_call_python(py_call* call, PyObject* const* args, size_t nargsf, PyObject* names) {
  PyObject *function = call->function->wrapped, *before = present, *responses = call->responses;
  if (responses == NULL) return PyObject_Vectorcall(function, args, nargsf, names);
  present = Py_NewRef(responses);
  PyObject* result = PyObject_Vectorcall(function, args, nargsf, names);
  py_pending pending = py_pending_save();
  /* Greenlets may end in the order in which they began, and then restore another's responses: so
   * each one removes its own. */
  PyObject* last = present;
  present = before; /* first: a deallocator may run Python, which converts */
  call->responses = NULL;
  PyDict_Clear(responses);
  Py_DECREF(responses);
  Py_XDECREF(last);
  py_pending_restore(pending);
  return result;
}

PyDoc_STRVAR(
    producer_response_doc,
    "producer_response(obj, /)\n--\n\n"
    "Return (obj, result, exception) of `__dlpack__` or an Arrow method if the fast path has "
    "called it for the\ncurrent conversion, else None. A response is returned once.");

static PyObject* producer_response(PyObject* module, PyObject* obj) {
  if (present == NULL) Py_RETURN_NONE;
  PyObject* address = PyLong_FromVoidPtr(obj);
  if (address == NULL) return NULL;
  PyObject* answer = Py_XNewRef(PyDict_GetItemWithError(present, address));
  if (answer && PyDict_DelItem(present, address) < 0) Py_CLEAR(answer);
  Py_DECREF(address);
  if (answer || PyErr_Occurred()) return answer;
  Py_RETURN_NONE;
}

PyMethodDef py_call_functions[] = {
    {"producer_response", producer_response, METH_O, producer_response_doc},
    {NULL, NULL, 0, NULL},
};
