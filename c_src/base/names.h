#ifndef DLX_NAMES_H_
#define DLX_NAMES_H_

/* Interned names of attributes, methods and keywords. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_NAMES(NAME)                                   \
  NAME(array_interface, "__array_interface__")           \
  NAME(arrow_array, "__arrow_c_array__")                 \
  NAME(arrow_stream, "__arrow_c_stream__")               \
  NAME(back, "back")                                     \
  NAME(begin, "_begin")                                  \
  NAME(convert_at, "_convert_at")                        \
  NAME(copy, "copy")                                     \
  NAME(cpu, "cpu")                                       \
  NAME(cuda_array_interface, "__cuda_array_interface__") \
  NAME(detach, "detach")                                 \
  NAME(device, "device")                                 \
  NAME(dl_device, "dl_device")                           \
  NAME(dlpack, "__dlpack__")                             \
  NAME(dlpack_device, "__dlpack_device__")               \
  NAME(dlx, "dlx")                                       \
  NAME(dtype, "dtype")                                   \
  NAME(hash, "__hash__")                                 \
  NAME(iterate, "_iterate")                              \
  NAME(lazy, "lazy")                                     \
  NAME(like, "like")                                     \
  NAME(max_version, "max_version")                       \
  NAME(module, "__module__")                             \
  NAME(out, "out")                                       \
  NAME(qualname, "__qualname__")                         \
  NAME(readonly, "readonly")                             \
  NAME(same_as, "same_as")                               \
  NAME(shape, "shape")                                   \
  NAME(stream, "stream")                                 \
  NAME(strides, "strides")                               \
  NAME(to, "to")                                         \
  NAME(touch, "_touch")

#define PY_NAME_DECLARED(name, text) extern PyObject* py_name_##name;
PY_NAMES(PY_NAME_DECLARED)

/* Keyword and argument of __dlpack__(max_version=...). */
extern PyObject *py_version_keywords, *py_version;

int py_names_init(void);

#endif
