#ifndef DLX_HOOKS_H_
#define DLX_HOOKS_H_

/* Python objects that C uses; dlx/_core/native.py registers them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Names and required types; NULL = a callable. */
#define PY_HOOKS(HOOK)                                                                             \
  HOOK(errors, &PyDict_Type)          /* {status: exception class} */                              \
  HOOK(device, &PyType_Type)          /* Device, a tuple (type, id) */                             \
  HOOK(dtype, &PyType_Type)           /* DType, a tuple (code, bits, lanes) */                     \
  HOOK(host, &PyTuple_Type)           /* Device("cpu") */                                          \
  HOOK(dtypes, &PyDict_Type)          /* {code | bits << 8: DType} for one lane; constant */       \
  HOOK(represent, NULL)               /* (tensor) -> str */                                        \
  HOOK(reduce, NULL)                  /* (tensor, protocol) -> tuple */                            \
  HOOK(array, NULL)                   /* (tensor, dtype, copy) -> numpy array */                   \
  HOOK(array_interface, NULL)         /* (tensor) -> dict */                                       \
  HOOK(cuda_interface, NULL)          /* (tensor) -> dict */                                       \
  HOOK(readonly_words, &PyTuple_Type) /* the values of `readonly`: copy, error, share; interned */ \
  HOOK(fill, NULL)          /* (object, out) -> whether a host array was copied to another one */  \
  HOOK(refused, NULL)       /* (function, names of keywords or None, exception) -> None */         \
  HOOK(stream_keeper, NULL) /* (device id, handle) -> owner of the stream, or None */

#define PY_HOOK_MEMBER(name, type) PyObject* name;
typedef struct {
  PY_HOOKS(PY_HOOK_MEMBER)
} py_hooks_table;

/* NULL = not registered yet. */
extern py_hooks_table py_hooks;

/* Check a hook that `name` needs. Owns: borrowed. Errors: NULL with AttributeError. */
PyObject* py_hook(PyObject* hook, const char* name);

extern PyMethodDef py_hooks_functions[];

#endif
