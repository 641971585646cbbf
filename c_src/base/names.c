#include "names.h"
#include "dlpack_abi.h"

#define DEFINED(name, text) PyObject* py_name_##name;
PY_NAMES(DEFINED)

PyObject *py_version_keywords, *py_version;

int py_names_init(void) {
#define INTERNED(name, text) \
  if ((py_name_##name = PyUnicode_InternFromString(text)) == NULL) return -1;
  PY_NAMES(INTERNED)
  py_version_keywords = PyTuple_Pack(1, py_name_max_version);
  py_version = Py_BuildValue("(ii)", DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR);
  return py_version_keywords && py_version ? 0 : -1;
}
