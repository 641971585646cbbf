/* A ring: frames in slots of shared memory, from one producer to many readers.
 *
 * A slot has the number of its frame, from 1, or 0 while it has none. A reader notes the number of
 * the frame that it holds, and then checks that the slot still has this number. The producer sets
 * the number of a slot to 0, and then checks that no reader holds that frame. In one total order of
 * these four steps, at least one of both sees the other. A process that is killed leaves nothing
 * locked; `dlx_ring_leave` removes a dead reader.
 *
 * Any process of the same user can write anything to this memory, so no word in it is used as an
 * address, an index or the end of a loop. */

#include "dlx.h"
#include "platform/platform.h"

#include <stdatomic.h>

enum { SPINS = 4000 /* about 10 us, less than a sleep and a wake take */ };

typedef struct {
  _Alignas(64) _Atomic uint64_t wanted; /* least number to read; seq_cst, as all in this file */
  _Atomic uint64_t held;                /* number of the frame it reads, or 0; seq_cst */
  _Atomic uint32_t is_active;           /* seq_cst */
} reader;

typedef struct {
  _Alignas(64) _Atomic uint64_t count; /* frames published; seq_cst */
  _Atomic uint32_t joined;             /* readers, including past ones; seq_cst */
  _Atomic uint32_t has_ended;          /* seq_cst */
  _Alignas(
      64) _Atomic uint32_t published;     /* changes with each frame; seq_cst, as all words below */
  _Atomic uint32_t readers_sleep;         /* seq_cst */
  _Alignas(64) _Atomic uint32_t released; /* changes with each released frame; seq_cst */
  _Atomic uint32_t producer_sleeps;       /* seq_cst */
  reader readers[DLX_RING_READERS];
  _Atomic uint64_t numbers[DLX_RING_SLOTS]; /* seq_cst */
} ring;

_Static_assert(sizeof(ring) <= DLX_RING_BYTES, "DLX_RING_BYTES is too small");

#define LOAD(word) atomic_load_explicit(&(word), memory_order_seq_cst)
#define STORE(word, value) atomic_store_explicit(&(word), value, memory_order_seq_cst)

/* The flag is taken before the word changes: a process that sets it later, and waits for the new
 * word, keeps it for the next wake. */
static void wake(_Atomic uint32_t* word, _Atomic uint32_t* sleeps) {
  uint32_t is_asleep = atomic_exchange_explicit(sleeps, 0, memory_order_seq_cst);
  atomic_fetch_add_explicit(word, 1, memory_order_seq_cst);
  if (is_asleep) dlx_wake_word(word);
}

static int can_replace(ring* r, uint64_t number, int overwrite) {
  for (int i = 0; i < DLX_RING_READERS; i++) {
    reader* each = &r->readers[i];
    if (!LOAD(each->is_active)) continue;
    if (LOAD(each->held) == number || (!overwrite && LOAD(each->wanted) <= number)) return 0;
  }
  return 1;
}

/* Return the slot of the oldest frame that may be replaced, without a number. Errors: -1. */
static int claim_slot(ring* r, int slots, int overwrite) {
  uint64_t from = 0;
  for (int tries = 0; tries < slots; tries++) {
    uint64_t least = UINT64_MAX;
    int slot = -1;
    for (int i = 0; i < slots; i++) {
      uint64_t number = LOAD(r->numbers[i]);
      if (number >= from && number < least) least = number, slot = i;
    }
    if (slot < 0 || least == 0) return slot;
    if (can_replace(r, least, overwrite)) {
      STORE(r->numbers[slot], 0);
      if (can_replace(r, least, overwrite)) return slot;
      STORE(r->numbers[slot], least);
    }
    if (!overwrite) return -1;
    from = least + 1;
  }
  return -1;
}

/* Return the slot of the next frame, now held, or of the newest one. Errors: -1. */
static int hold_frame(ring* r, int slots, reader* own, int newest) {
  uint64_t wanted = LOAD(own->wanted), seen = wanted;
  for (int tries = 0; tries < DLX_RING_SLOTS; tries++) {
    uint64_t found = 0;
    int slot = -1;
    for (int i = 0; i < slots; i++) {
      uint64_t number = LOAD(r->numbers[i]);
      if (number == 0 || number < wanted) continue;
      if (slot < 0 || (newest ? number > found : number < found)) found = number, slot = i;
    }
    if (slot < 0) return -1;
    if (!newest && found != seen) { /* an earlier one may be in a slot that was still empty above */
      seen = found;
      continue;
    }
    STORE(own->held, found);
    if (LOAD(r->numbers[slot]) == found) return slot;
    STORE(own->held, 0);
  }
  return -1;
}

int dlx_ring_claim(void* memory, int slots, int overwrite, int readers, int64_t nanoseconds) {
  ring* r = memory;
  for (int tries = 0;; tries++) {
    uint32_t seen = LOAD(r->released);
    if (tries > 1) STORE(r->producer_sleeps, 1); /* before the condition is read again */
    int slot = LOAD(r->joined) < (uint32_t)readers ? -1 : claim_slot(r, slots, overwrite);
    if (slot >= 0 || nanoseconds <= 0 || tries > 2) return slot;
    if (tries == 0) {
      for (int i = 0; i < SPINS && LOAD(r->released) == seen; i++) continue;
    } else if (tries == 2) {
      dlx_wait_word(&r->released, seen, nanoseconds);
    }
  }
}

void dlx_ring_publish(void* memory, int slot) {
  ring* r = memory;
  uint64_t number = LOAD(r->count) + 1;
  STORE(r->numbers[slot], number);
  STORE(r->count, number);
  wake(&r->published, &r->readers_sleep);
}

void dlx_ring_end(void* memory) {
  ring* r = memory;
  STORE(r->has_ended, 1);
  STORE(r->readers_sleep, 1);
  wake(&r->published, &r->readers_sleep);
}

void dlx_ring_join(void* memory, int number) {
  ring* r = memory;
  reader* own = &r->readers[number];
  STORE(own->held, 0);
  STORE(own->wanted, LOAD(r->count) + 1);
  STORE(own->is_active, 1);
  STORE(own->wanted, LOAD(r->count) + 1); /* frames from before it was active may be replaced */
  atomic_fetch_add_explicit(&r->joined, 1, memory_order_seq_cst);
  wake(&r->released, &r->producer_sleeps);
}

int dlx_ring_next(void* memory, int slots, int number, int newest, int64_t nanoseconds) {
  ring* r = memory;
  reader* own = &r->readers[number];
  for (int tries = 0;; tries++) {
    uint32_t seen = LOAD(r->published), has_ended = LOAD(r->has_ended);
    if (tries > 1) STORE(r->readers_sleep, 1); /* before the condition is read again */
    int slot = hold_frame(r, slots, own, newest);
    if (slot >= 0) return slot;
    if (has_ended) return DLX_RING_ENDED; /* read before the frames */
    if (nanoseconds <= 0 || tries > 2) return -1;
    if (tries == 0) {
      for (int i = 0; i < SPINS && LOAD(r->published) == seen; i++) continue;
    } else if (tries == 2) {
      dlx_wait_word(&r->published, seen, nanoseconds);
    }
  }
}

uint64_t dlx_ring_held(void* memory, int number) {
  return LOAD(((ring*)memory)->readers[number].held);
}

void dlx_ring_release(void* memory, int number) {
  ring* r = memory;
  reader* own = &r->readers[number];
  uint64_t held = LOAD(own->held);
  if (held == 0) return;
  STORE(own->wanted, held + 1);
  STORE(own->held, 0);
  wake(&r->released, &r->producer_sleeps);
}

void dlx_ring_leave(void* memory, int number) {
  ring* r = memory;
  STORE(r->readers[number].is_active, 0);
  wake(&r->released, &r->producer_sleeps);
}
