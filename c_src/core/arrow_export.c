/* Export tensors as Arrow's structs. */

#include "arrow.h"

#include "allocate.h"

#include <stdio.h>
#include <string.h>

typedef struct {
  char format[24];
  struct ArrowSchema* children[1];
  struct ArrowSchema child;
} schema_level;

static void release_schema(struct ArrowSchema* schema) {
  schema_level* level = schema->private_data;
  if (schema->n_children && level->child.release) level->child.release(&level->child);
  free(level);
  schema->release = NULL;
}

int dlx_arrow_export_schema(const DLTensor* tensor, struct ArrowSchema* out) {
  char letter = dlx_arrow_letter(tensor->dtype);
  if (letter == '\0') return DLX_E_DTYPE;
  if (tensor->ndim < 1) return DLX_E_NDIM;
  struct ArrowSchema* at = out;
  out->release = NULL;
  for (int32_t i = 1; i <= tensor->ndim; i++) {
    schema_level* level = dlx_allocate(sizeof *level);
    if (level == NULL) {
      if (out->release) release_schema(out);
      return DLX_E_MEMORY;
    }
    int is_list = i < tensor->ndim;
    *level = (schema_level){.format = {letter}, .children = {&level->child}};
    if (is_list)
      snprintf(level->format, sizeof level->format, "+w:%lld", (long long)tensor->shape[i]);
    *at = (struct ArrowSchema){.format = level->format,
                               .name = i > 1 ? "item" : "",
                               .flags = ARROW_FLAG_NULLABLE,
                               .n_children = is_list,
                               .children = is_list ? level->children : NULL,
                               .release = release_schema,
                               .private_data = level};
    at = &level->child;
  }
  return DLX_OK;
}

typedef struct {
  const void* buffers[2];
  DLManagedTensorVersioned* memory;
  struct ArrowArray* children[1];
  struct ArrowArray child;
} array_level;

static void release_array(struct ArrowArray* array) {
  array_level* level = array->private_data;
  if (array->n_children && level->child.release) level->child.release(&level->child);
  if (level->memory) dlx_managed_release(level->memory);
  free(level);
  array->release = NULL;
}

/* Pack bools of a row-major tensor, eight per byte. Errors: as dlx_managed_empty. */
static int pack(const DLTensor* bools, DLManagedTensorVersioned** out) {
  int64_t n = dlx_size(bools), n_bytes = n / 8 + (n % 8 != 0);
  DLTensor like = {.ndim = 1, .dtype = {kDLUInt, 8, 1}, .shape = &n_bytes};
  int status = dlx_managed_empty(&like, 0, 0, out);
  if (status != DLX_OK) return status;
  const uint8_t* from = (const uint8_t*)bools->data + bools->byte_offset;
  uint8_t* to = (*out)->dl_tensor.data;
  for (int64_t i = 0; i < n_bytes; i++, from += 8) {
    int64_t left = n - 8 * i;
    unsigned packed = 0;
    for (int bit = 0; bit < (left < 8 ? left : 8); bit++) packed |= (from[bit] != 0u) << bit;
    to[i] = (uint8_t)packed;
  }
  return DLX_OK;
}

int dlx_arrow_export_array(DLManagedTensorVersioned* made, struct ArrowArray* out) {
  const DLTensor* tensor = &made->dl_tensor;
  DLManagedTensorVersioned* memory;
  if (!dlx_host_readable(tensor->device.device_type)) return DLX_E_DEVICE;
  if (dlx_arrow_letter(tensor->dtype) == '\0') return DLX_E_DTYPE;
  if (tensor->ndim < 1) return DLX_E_NDIM;
  if (dlx_layout(tensor) != 0) return DLX_E_COPY;
  int status = tensor->dtype.code == kDLBool ? pack(tensor, &memory)
                                             : dlx_managed_share(made, NULL, made->flags, &memory);
  if (status != DLX_OK) return status;
  struct ArrowArray* at = out;
  out->release = NULL;
  int64_t length = tensor->shape[0];
  for (int32_t i = 1; i <= tensor->ndim && status == DLX_OK; i++) {
    array_level* level = dlx_allocate(sizeof *level);
    int is_list = i < tensor->ndim;
    if (level == NULL) {
      status = DLX_E_MEMORY;
      break;
    }
    *level = (array_level){.children = {&level->child}};
    *at = (struct ArrowArray){.length = length,
                              .n_buffers = is_list ? 1 : 2,
                              .n_children = is_list,
                              .buffers = level->buffers,
                              .children = is_list ? level->children : NULL,
                              .release = release_array,
                              .private_data = level};
    if (!is_list) {
      level->buffers[1] = memory->dl_tensor.data;
      level->memory = memory;
    } else if (tensor->shape[i] > INT32_MAX || /* Arrow's list sizes have 32 bits */
               __builtin_mul_overflow(length, tensor->shape[i], &length)) {
      status = DLX_E_OVERFLOW;
    }
    at = &level->child;
  }
  if (status == DLX_OK) return DLX_OK;
  dlx_managed_release(memory);
  if (out->release) release_array(out);
  return status;
}
