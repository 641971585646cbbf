/* What producers answered in vain, for the Python path of the same call: see call.h. */

#include "call.h"
#include "core/thread_state.h"
#include "base/threads.h"

/* The answers that the Python path that runs now was left. */
static FEW_WORDS PyObject* present;

void py_call_leave(py_call* call, PyObject* obj, PyObject* answer, int is_raised) {
  if (call->answers == NULL) call->answers = PyDict_New();
  PyObject* address = call->answers ? PyLong_FromVoidPtr(obj) : NULL;
  PyObject* entry =
      address ? PyTuple_Pack(3, obj, is_raised ? Py_None : answer, is_raised ? answer : Py_None)
              : NULL;
  if (entry == NULL || PyDict_SetItem(call->answers, address, entry) < 0) {
    py_pending pending = py_pending_save(); /* capsules may be freed */
    Py_CLEAR(call->answers);
    py_pending_restore(pending);
  }
  Py_XDECREF(entry);
  Py_XDECREF(address);
}

int py_call_has_answer(PyObject* obj) {
  if (present == NULL) return 0;
  PyObject* address = PyLong_FromVoidPtr(obj);
  int found = address ? PyDict_Contains(present, address) : -1;
  Py_XDECREF(address);
  return found != 0;
}

PyObject* py_call_python(py_call* call, PyObject* const* args, size_t nargsf, PyObject* names) {
  PyObject *function = call->function->wrapped, *before = present, *answers = call->answers;
  if (answers == NULL) return PyObject_Vectorcall(function, args, nargsf, names);
  present = Py_NewRef(answers);
  PyObject* result = PyObject_Vectorcall(function, args, nargsf, names);
  py_pending pending = py_pending_save();
  /* Of two greenlets the one that began first may end first, and leave here what the other one
   * began with: so each takes away what it was left itself. */
  PyObject* last = present;
  present = before; /* first: what is released may run Python, which converts */
  call->answers = NULL;
  PyDict_Clear(answers);
  Py_DECREF(answers);
  Py_XDECREF(last);
  py_pending_restore(pending);
  return result;
}

PyDoc_STRVAR(producer_answer_doc,
             "producer_answer(obj, /)\n--\n\n"
             "Return (obj, what its `__dlpack__` or Arrow's method gave, what it raised) where the "
             "fast path "
             "called it for\nthe conversion that runs now; else None. It is given once.");

static PyObject* producer_answer(PyObject* module, PyObject* obj) {
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
    {"producer_answer", producer_answer, METH_O, producer_answer_doc},
    {NULL, NULL, 0, NULL},
};
