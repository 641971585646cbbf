/* Exchange tables of other libraries. A missing table is not cached: it may be added later. */

#include "interop.h"

const DLPackExchangeAPI* py_exchange_read(PyObject* attribute, int may_be_number) {
  static const char name[] = "dlpack_exchange_api";
  void* found = NULL;
  if (PyCapsule_IsValid(attribute, name)) {
    found = PyCapsule_GetPointer(attribute, name);
  } else if (may_be_number && PyLong_CheckExact(attribute)) { /* DLPack 1.2: an address */
    found = PyLong_AsVoidPtr(attribute);
    if (found == NULL) py_error_forget(); /* too large for an address */
    uintptr_t address = (uintptr_t)found; /* ignore other numbers */
    if (address < 4096 || address % sizeof(void*) || address > INTPTR_MAX) found = NULL;
  }
  return py_find_exchange(found);
}

const DLPackExchangeAPI* py_exchange_find(PyTypeObject* type) {
  static const char* const names[] = {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"};
  for (int i = 0; i < 2; i++) {
    PyObject* attribute = PyObject_GetAttrString((PyObject*)type, names[i]);
    if (attribute == NULL) { /* a metaclass may run Python */
      if (py_error_forget() < 0) return NULL;
      continue;
    }
    /* The table is static: it outlives the attribute. */
    const DLPackExchangeAPI* table = py_exchange_read(attribute, i == 1);
    Py_DECREF(attribute);
    if (table) return table;
  }
  return NULL;
}

static const DLPackExchangeAPI* find_table(PyObject* obj) {
  const DLPackExchangeAPI* table = py_exchange_find(Py_TYPE(obj));
  if (table == NULL && !PyErr_Occurred())
    py_raise(DLX_E_VERSION, "%.200s has no DLPack 1.x exchange table", Py_TYPE(obj)->tp_name);
  return table;
}

/* A slot that returns 0 with an exception has failed as well. Errors: -1 with its exception, or a
 * SystemError. */
static int check_slot(int status, PyObject* obj, const char* slot) {
  if (status == 0 && !PyErr_Occurred()) return 0;
  if (!PyErr_Occurred())
    PyErr_Format(PyExc_SystemError, "%s of %.200s failed without an exception", slot,
                 Py_TYPE(obj)->tp_name);
  return -1;
}

int py_exchange_managed(const DLPackExchangeAPI* table, PyObject* obj,
                        DLManagedTensorVersioned** out) {
  DLManagedTensorVersioned* foreign = NULL;
  if (check_slot(table->managed_tensor_from_py_object_no_sync(obj, &foreign), obj, "the export") <
      0)
    return -1;
  if (foreign == NULL) return check_slot(-1, obj, "the export");
  if (dlx_managed_is_sole(foreign)) { /* dlx's */
    *out = foreign;
    return 0;
  }
  int status = dlx_managed_adopt(foreign, out);
  if (status != DLX_OK) dlx_managed_release(foreign);
  return py_check(status);
}

PY_DOC(exchange_export, "Export an array by its type's exchange table, as a dlx.Tensor.");
static PyObject* exchange_export(PyObject* module, PyObject* obj) {
  DLManagedTensorVersioned* made;
  const DLPackExchangeAPI* table = find_table(obj);
  if (table == NULL) return NULL;
  if (table->managed_tensor_from_py_object_no_sync == NULL)
    return py_raise(DLX_E_VERSION, "the exchange table of %.200s cannot export",
                    Py_TYPE(obj)->tp_name);
  return py_exchange_managed(table, obj, &made) == 0 ? py_tensor_wrap(made) : NULL;
}

PY_DOC(exchange_stream,
       "Return the handle of the current stream from an array's exchange table, or 0.");
static PyObject* exchange_stream(PyObject* module, PyObject* args) {
  PyObject* obj;
  int type, id;
  void* stream = NULL;
  if (!PyArg_ParseTuple(args, "Oii:exchange_stream", &obj, &type, &id)) return NULL;
  const DLPackExchangeAPI* table = find_table(obj);
  if (table == NULL) return NULL;
  if (table->current_work_stream &&
      check_slot(table->current_work_stream(type, id, &stream), obj, "the stream") < 0)
    return NULL;
  return PyLong_FromVoidPtr(stream);
}

PyMethodDef py_exchange_functions[] = {PY_ONE(exchange_export), PY_VARARGS(exchange_stream),
                                       PY_END};
