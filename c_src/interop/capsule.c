/* DLPack capsules: state, claim, restore. A capsule with a fresh name owns its managed tensor; the
 * consumer takes ownership by renaming it. Names must outlive every capsule. */

#include "interop.h"
#include "base/threads.h"

enum { VERSIONED, LEGACY };
static const char* const fresh_name[] = {"dltensor_versioned", "dltensor"};
static const char* const used_name[] = {"used_dltensor_versioned", "used_dltensor"};

static int is_named(PyObject* obj, const char* const names[2], int* legacy) {
  *legacy = PyCapsule_IsValid(obj, names[LEGACY]);
  return *legacy || PyCapsule_IsValid(obj, names[VERSIONED]);
}

/* Destructors may run while an exception is pending. */
static void destroy_versioned(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, fresh_name[VERSIONED]))
    py_managed_release(PyCapsule_GetPointer(capsule, fresh_name[VERSIONED]));
}

static void destroy_legacy(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, fresh_name[LEGACY])) return;
  py_pending pending = py_pending_save();
  dlx_legacy_release(PyCapsule_GetPointer(capsule, fresh_name[LEGACY]));
  py_pending_restore(pending);
}

static const PyCapsule_Destructor destroy[] = {destroy_versioned, destroy_legacy};

PyObject* py_capsule_wrap(DLManagedTensorVersioned* made, int legacy) {
  DLManagedTensor* shell = NULL;
  int status = legacy ? dlx_legacy_export(made, &shell) : DLX_OK;
  if (status != DLX_OK) {
    dlx_managed_release(made);
    return py_raise(status, NULL);
  }
  void* content = legacy ? (void*)shell : made;
  PyObject* capsule = PyCapsule_New(content, fresh_name[legacy], destroy[legacy]);
  if (capsule == NULL) legacy ? dlx_legacy_release(content) : dlx_managed_release(content);
  return capsule;
}

PY_DOC(capsule_state, "Return 'versioned', 'legacy', 'used', or None for other objects.");
static PyObject* capsule_state(PyObject* module, PyObject* obj) {
  int legacy;
  if (is_named(obj, fresh_name, &legacy))
    return PyUnicode_FromString(legacy ? "legacy" : "versioned");
  if (is_named(obj, used_name, &legacy)) return PyUnicode_FromString("used");
  Py_RETURN_NONE;
}

/* Errors: 0 with an exception. */
static int check_fresh(PyObject* obj, int* legacy) {
  if (is_named(obj, fresh_name, legacy)) return 1;
  if (is_named(obj, used_name, legacy)) {
    py_raise(DLX_E_CONSUMED, NULL);
  } else if (PyCapsule_CheckExact(obj)) {
    const char* name = PyCapsule_GetName(obj);
    py_raise(DLX_E_CAPSULE,
             "a capsule named '%s' is not a DLPack capsule. Pass an object with __dlpack__.",
             name ? name : "NULL");
  } else {
    py_raise(DLX_E_CAPSULE, "%.200s is not a DLPack capsule", Py_TYPE(obj)->tp_name);
  }
  return 0;
}

/* Owns: *out owes the deleter of the capsule's managed tensor. Errors: a status. */
static int wrap_content(PyObject* capsule, int legacy, DLManagedTensorVersioned** out) {
  return legacy ? dlx_legacy_adopt(PyCapsule_GetPointer(capsule, fresh_name[LEGACY]), out)
                : dlx_managed_adopt(PyCapsule_GetPointer(capsule, fresh_name[VERSIONED]), out);
}

static PyObject* raise_refused(int status, PyObject* capsule, int legacy) {
  if (status == DLX_E_VERSION && !legacy) {
    const DLManagedTensorVersioned* m = PyCapsule_GetPointer(capsule, fresh_name[VERSIONED]);
    return py_raise(
        status, "the capsule has DLPack %u.%u, dlx reads 1.x. Update dlx, or export with DLPack 1.",
        m->version.major, m->version.minor);
  }
  return py_raise(status, NULL);
}

/* Take the tensor of a capsule of ours without another wrapper, unless it is shared: repeated
 * claims and restores must not build a chain. Owns: the caller gets the capsule's count. Errors:
 * NULL = it must be wrapped. */
static DLManagedTensorVersioned* unwrap(PyObject* capsule, int legacy) {
  if (PyCapsule_GetDestructor(capsule) != destroy[legacy]) return NULL;
  void* content = PyCapsule_GetPointer(capsule, fresh_name[legacy]);
  DLManagedTensorVersioned* made = NULL;
  if (legacy)
    made = dlx_legacy_unwrap(content);
  else if (dlx_managed_is_sole(content))
    made = content;
  if (made) PyCapsule_SetPointer(capsule, made);
  return made;
}

/* Everything that can fail or run Python comes first (an allocation may start the collector):
 * no Python may run between taking the pointer and renaming the capsule. */
PY_DOC(
    capsule_claim,
    "capsule_claim(capsule, tensor=None, /)\n--\n\n"
    "Take ownership of a capsule's managed tensor and mark the capsule as used.\n\n"
    "Return the new owner: `tensor`, or a new dlx.Tensor. `capsule_restore` undoes this. If the\n"
    "claim fails, the capsule is unchanged and its destructor frees the tensor.");
static PyObject* capsule_claim(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("capsule_claim", nargs, 1, 2)) return NULL;
  PyObject *capsule = args[0], *owner = nargs == 2 && args[1] != Py_None ? args[1] : NULL;
  if (owner && py_tensor_managed(owner) == NULL) return NULL;
  TensorObject* tensor = owner ? (TensorObject*)Py_NewRef(owner) : py_tensor_alloc();
  if (tensor == NULL) return NULL;
  DLManagedTensorVersioned *before = tensor->managed, *claimed = NULL;
  int legacy;
  PY_LOCKED(capsule) /* only one thread claims it */
  if (check_fresh(capsule, &legacy)) {
    claimed = unwrap(capsule, legacy);
    int status = claimed ? DLX_OK : wrap_content(capsule, legacy, &claimed);
    if (status == DLX_OK)
      PyCapsule_SetName(capsule, used_name[legacy]);
    else
      raise_refused(status, capsule, legacy);
  }
  PY_UNLOCKED()
  if (claimed) {
    tensor->managed = claimed;
    if (tensor->ready) dlx_ready_drop(tensor->ready);
    tensor->ready = NULL;
    tensor->is_ordered = tensor->is_on_own_stream = 0;
    if (before) dlx_managed_release(before);
    return (PyObject*)tensor;
  }
  Py_DECREF(tensor);
  return NULL;
}

DLManagedTensorVersioned* py_capsule_take(PyObject* capsule) {
  DLManagedTensorVersioned* made = NULL;
  int legacy;
  PY_LOCKED(capsule)
  if (is_named(capsule, fresh_name, &legacy) && wrap_content(capsule, legacy, &made) == DLX_OK)
    PyCapsule_SetName(capsule, used_name[legacy]);
  PY_UNLOCKED()
  return made;
}

int py_capsule_give_back(PyObject* capsule, DLManagedTensorVersioned* made) {
  int legacy, is_back = 0;
  PY_LOCKED(capsule)
  if (is_named(capsule, used_name, &legacy)) {
    void* foreign = PyCapsule_GetPointer(capsule, used_name[legacy]);
    is_back = dlx_managed_is_sole(made) && dlx_managed_owner(made, NULL) == foreign;
    if (is_back) dlx_managed_own(made, NULL, NULL);
    if (is_back) PyCapsule_SetName(capsule, fresh_name[legacy]);
  }
  PY_UNLOCKED()
  if (is_back) dlx_managed_release(made);
  return is_back;
}

int py_capsule_export(PyObject* obj, DLManagedTensorVersioned** out) {
  PyObject* arguments[] = {obj, py_version};
  PyObject* capsule = PyObject_VectorcallMethod(py_name_dlpack, arguments, 1, py_version_keywords);
  if (capsule == NULL) return -1;
  *out = py_capsule_take(capsule);
  if (*out == NULL) py_raise(DLX_E_CAPSULE, NULL);
  py_drop(capsule);
  return *out ? 0 : -1;
}

PY_DOC(capsule_peek, "Return a dlx.Tensor of a capsule's tensor, without consuming the capsule.");
static PyObject* capsule_peek(PyObject* module, PyObject* capsule) {
  TensorObject* tensor = py_tensor_alloc();
  if (tensor == NULL) return NULL;
  int legacy;
  DLManagedTensorVersioned *checked = NULL, *borrowed = NULL;
  PY_LOCKED(capsule)
  if (check_fresh(capsule, &legacy)) {
    int status = wrap_content(capsule, legacy, &checked);
    if (status == DLX_OK) {
      /* Only the checks were needed: the capsule stays the owner. */
      dlx_managed_own(checked, NULL, NULL);
      status = dlx_managed_new(&checked->dl_tensor, checked->flags, capsule, py_release_object,
                               &borrowed);
    }
    if (status != DLX_OK) raise_refused(status, capsule, legacy);
  }
  PY_UNLOCKED()
  if (checked) dlx_managed_release(checked);
  if (borrowed) {
    Py_INCREF(capsule);
    tensor->managed = borrowed;
    return (PyObject*)tensor;
  }
  Py_DECREF(tensor);
  return NULL;
}

/* Other threads may read the tensor: it stays the owner, and the capsule gets a count on it. The
 * producer's destructor cannot free that, so ours replaces it. The producer's runs now, as for any
 * used capsule, and may run Python. */
PY_DOC(capsule_restore,
       "Undo capsule_claim: restore the capsule's name and content. Return whether that was "
       "possible.");
static PyObject* capsule_restore(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  DLManagedTensorVersioned* made =
      py_check_args("capsule_restore", nargs, 2, 2) ? py_tensor_managed(args[1]) : NULL;
  if (made == NULL) return NULL;
  PyObject* capsule = args[0];
  int legacy, is_back = 0;
  if (!is_named(capsule, used_name, &legacy)) Py_RETURN_FALSE;
  const char* used = used_name[legacy];
  DLManagedTensor* shell = NULL;
  void* claimed = PyCapsule_GetPointer(capsule, used);
  if (made != claimed && dlx_managed_owner(made, NULL) != claimed) Py_RETURN_FALSE;
  dlx_managed_hold(made);
  PyCapsule_Destructor foreign = PyCapsule_GetDestructor(capsule);
  PyCapsule_SetDestructor(capsule, destroy[legacy]);
  if (foreign && foreign != destroy[legacy]) {
    py_pending pending = py_pending_save();
    foreign(capsule);
    py_pending_restore(pending);
  }
  PY_LOCKED(capsule)
  if (PyCapsule_IsValid(capsule, used) && PyCapsule_GetPointer(capsule, used) == claimed &&
      (!legacy || dlx_legacy_export(made, &shell) == DLX_OK)) {
    PyCapsule_SetPointer(capsule, legacy ? (void*)shell : made);
    PyCapsule_SetName(capsule, fresh_name[legacy]);
    is_back = 1;
  }
  PY_UNLOCKED()
  if (!is_back) dlx_managed_release(made);
  return PyBool_FromLong(is_back);
}

PyMethodDef py_capsule_functions[] = {PY_ONE(capsule_state), PY_FASTCALL(capsule_claim),
                                      PY_ONE(capsule_peek), PY_FASTCALL(capsule_restore), PY_END};
