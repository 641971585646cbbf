#ifndef DLX_GATE_H_
#define DLX_GATE_H_

/* Checks of an array, its owner and its framework before memory is shared. References are borrowed
 * from the source that contains the checks. */

#include "interop/interop.h"

/* An attribute, or a method without arguments, with its C function if there is one. */
typedef struct {
  PyObject* name;     /* NULL = unused */
  PyTypeObject* type; /* the exact type that the C functions are for; compared, not held */
  getter get;
  void* closure;
  PyCFunction call; /* METH_NOARGS */
  int is_method;
} py_question;

/* A question whose answer must be false. */
typedef struct {
  py_question ask;
  uint32_t codes;      /* bit n = asked for the dtype code n */
  py_question resolve; /* asked of the array if the answer is true; makes it false permanently */
} py_guard;

/* A value in a dict that must be this object (a framework's switch is off), or an attribute that
 * must equal it (the capabilities of a target depend on it). */
typedef struct {
  PyObject *owner, *name, *value;
  uint64_t version; /* of the dict when the switch was last off; before Python 3.12 */
} py_switch;

typedef struct {
  int n;
  py_switch* at;
} py_switches;

typedef struct {
  py_switches switches;
  py_guard* guards; /* in three ranges: early ones, checked before a borrow, which may change the
                       array; the array's; its owner's */
  int n_early, n_of_array, n;
  dlx_guard_function in_c; /* further guards in C; or NULL */
} py_gate;

/* Errors: NULL with an exception. */
PyObject* py_ask(const py_question* question, PyObject* obj);

/* Whether all switches are off and no early guard applies. */
int py_gate_is_open(py_gate* gate, PyObject* obj);

/* Return 1 if the answer is false, or `resolve` made it false. */
int py_guard_is_false(const py_guard* guard, PyObject* obj, PyObject* asked);

/* Whether no guard in a range applies for a dtype code; `asked` is the array or its owner. */
static inline int py_gate_is_clear(const py_gate* gate, int first, int end, int code, PyObject* obj,
                                   PyObject* asked) {
  for (int i = first; i < end; i++) {
    if (gate->guards[i].codes >> code & 1 && !py_guard_is_false(&gate->guards[i], obj, asked))
      return 0;
  }
  return 1;
}

int py_gate_asks(const py_gate* gate, int code);

/* Whether all attributes equal their expected values. Errors: 1 = yes; 0 = no; -1 = fallback. */
int py_switches_hold(const py_switches* states);

/* Read objects of dlx/_engine/fast_path.py: a Question, of the source's type unless it names
 * another; a tuple of Guard; a tuple of Switch. Owns: allocated memory; the free functions release
 * it. */
int py_question_read(PyObject* value, PyTypeObject* type, py_question* out);
int py_guards_read(PyObject* value, PyTypeObject* type, py_gate* out);
int py_switches_read(PyObject* value, PyTypeObject* owners, py_switches* out);
void py_gate_free(py_gate* gate);
void py_switches_free(py_switches* switches);

#endif
