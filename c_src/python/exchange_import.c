/* Exchange tables of others: found on the exact type, never trusted about versions, and never
 * cached as absent (a library may add one to a type after import). */

#include "dlx_python.h"

static const char k_table[] = "dlpack_exchange_api";

const DLPackExchangeAPI* py_exchange_read(PyObject* attribute, int may_be_number) {
  void* found = NULL;
  if (PyCapsule_IsValid(attribute, k_table)) {
    found = PyCapsule_GetPointer(attribute, k_table);
  } else if (may_be_number && PyLong_CheckExact(attribute)) { /* DLPack 1.2 published an address */
    found = PyLong_AsVoidPtr(attribute);
    if (found == NULL) py_error_forget(); /* a number beyond all addresses */
    uintptr_t address = (uintptr_t)found; /* small, odd and negative numbers are none */
    if (address < 4096 || address % sizeof(void*) || address > INTPTR_MAX) found = NULL;
  }
  /* Newer tables keep older ones behind them; the layout is only known for our major version. */
  const DLPackExchangeAPIHeader* header = found;
  for (int steps = 0; header && steps < 32; steps++, header = header->prev_api) {
    if (header->version.major == DLX_DLPACK_MAJOR) return (const DLPackExchangeAPI*)header;
  }
  return NULL;
}

const DLPackExchangeAPI* py_exchange_find(PyTypeObject* type) {
  static const char* const names[] = {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"};
  for (int i = 0; i < 2; i++) {
    PyObject* attribute = PyObject_GetAttrString((PyObject*)type, names[i]);
    if (attribute == NULL) { /* a metaclass may run Python */
      if (py_error_forget() < 0) return NULL;
      continue;
    }
    /* The table is static for the life of the process, whatever becomes of the attribute. */
    const DLPackExchangeAPI* table = py_exchange_read(attribute, i == 1);
    Py_DECREF(attribute);
    if (table) return table;
  }
  return NULL;
}
