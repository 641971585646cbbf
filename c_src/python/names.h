#ifndef DLX_NAMES_H_
#define DLX_NAMES_H_

/* The names that C looks attributes, methods and keywords up by. cffi never reads this. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Each is interned once, as py_name_... */
#define PY_NAMES(NAME)                     \
  NAME(arrow_array, "__arrow_c_array__")   \
  NAME(arrow_stream, "__arrow_c_stream__") \
  NAME(back, "back")                       \
  NAME(copy, "copy")                       \
  NAME(dl_device, "dl_device")             \
  NAME(dlpack, "__dlpack__")               \
  NAME(max_version, "max_version")         \
  NAME(missed, "_missed")                  \
  NAME(same_as, "same_as")                 \
  NAME(stream, "stream")                   \
  NAME(touch, "_touch")

#define PY_NAME_DECLARED(name, text) extern PyObject* py_name_##name;
PY_NAMES(PY_NAME_DECLARED)

/* What a call __dlpack__(max_version=...) is made with: its keywords, and the newest version. */
extern PyObject *py_version_keywords, *py_version;

/* Make them all. GIL: needed. Errors: -1 with an exception. */
int py_names_init(void);

#endif
