/* The only file that accesses DLManagedTensor, the struct from before DLPack 1.0. Imported ones are
 * wrapped; exported ones are thin shells around a managed tensor of dlx. */

#include "allocate.h"

int dlx_legacy_adopt(DLManagedTensor* foreign, DLManagedTensorVersioned** out) {
  return dlx_managed_new(&foreign->dl_tensor, 0, foreign, dlx_legacy_release, out);
}

static void drop_shell(DLManagedTensor* self) {
  dlx_managed_release(self->manager_ctx);
  free(self);
}

int dlx_legacy_export(DLManagedTensorVersioned* made, DLManagedTensor** out) {
  DLManagedTensor* shell = dlx_allocate(sizeof *shell);
  if (shell == NULL) return DLX_E_MEMORY;
  shell->dl_tensor = made->dl_tensor; /* shape and strides live as long as `made` */
  shell->manager_ctx = made;
  shell->deleter = drop_shell;
  *out = shell;
  return DLX_OK;
}

DLManagedTensorVersioned* dlx_legacy_unwrap(DLManagedTensor* shell) {
  DLManagedTensorVersioned* made = shell->manager_ctx;
  if (!dlx_managed_is_sole(made) || made->flags) return NULL;
  free(shell);
  return made;
}

void dlx_legacy_release(void* managed) {
  DLManagedTensor* self = managed;
  if (self->deleter) self->deleter(self);
}

void dlx_count_legacy(DLManagedTensor* self) {
  atomic_fetch_add_explicit((_Atomic uint64_t*)self->manager_ctx, 1, memory_order_relaxed);
}
