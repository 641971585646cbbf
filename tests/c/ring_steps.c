/* Runs a producer and readers of a ring in many orders of their steps.
 *
 *     ring_steps explore OVERWRITE SWITCHES          orders with so many switches
 *     ring_steps explore OVERWRITE SWITCHES kill     the same, with a death
 *     ring_steps explore OVERWRITE SWITCHES wakes    switches only where processes sleep or wake
 *     ring_steps threads OVERWRITE FRAMES            threads, for ThreadSanitizer
 *
 * Each access to the memory of a ring is a step. A process in `explore` is a coroutine, and a wait
 * ends only by a wake: a wake that is missing stops the run. A dead process takes no further step;
 * the producer removes it when it has waited in vain, as dlx does.
 * tests/support/stress/ring_steps.py builds this. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "dlx.h"

enum { READERS = 2, SLOTS = 3, FRAMES = 4, PROCESSES = 1 + READERS, STACK = 1 << 16, STEPS = 4096 };

#define DLX_RING_READERS READERS /* fewer steps */
#define DLX_RING_SLOTS SLOTS
#include "ring_steps.h"

#define HOLDS(condition) ((condition) ? (void)0 : broken(#condition, __LINE__))

static _Alignas(64) char memory[sizeof(ring)];
static uint64_t words[SLOTS][2]; /* a frame: its number, twice */
static int overwrite;

typedef struct {
  ucontext_t context;
  const volatile void* last; /* a repeated load of one word is no step: it would spin */
  void* waits;               /* the word that it waits for */
  uint64_t from, read;       /* of a reader: the first frame that it must get, and its last one */
  int has_ended, is_dead;
} process;

static process processes[PROCESSES];
static ucontext_t scheduler;
static int current = -1, is_threaded;
static long steps, switches[4], victim_step;
static int targets[4], n_switches, victim, is_replaced, is_void, only_wakes;
static char is_wake[STEPS]; /* whether a step uses a word on which processes sleep */

_Noreturn static void broken(const char* condition, int line) {
  fprintf(stderr, "ring_steps.c:%d: does not hold: %s; overwrite %d, process %d", line, condition,
          overwrite, current);
  for (int i = 0; i < n_switches; i++)
    fprintf(stderr, ", to %d before step %ld", targets[i], switches[i]);
  if (victim_step)
    fprintf(stderr, ", %d dies before step %ld%s", victim, victim_step,
            is_replaced ? " and is replaced" : "");
  fprintf(stderr, "\n");
  exit(1);
}

static void yield_to_scheduler(void) {
  swapcontext(&processes[current].context, &scheduler);
}

static void step(const volatile void* word, int is_load) {
  if (is_threaded || current < 0) return;
  process* own = &processes[current];
  if (is_load && own->last == word) return;
  own->last = is_load ? word : NULL;
  steps++;
  HOLDS(steps < STEPS);
  ring* r = (ring*)memory;
  is_wake[steps] = !word || word == &r->published || word == &r->readers_sleep ||
                   word == &r->released || word == &r->producer_sleeps;
  if (steps == victim_step) {
    victim = current;
    own->is_dead = 1;
    yield_to_scheduler(); /* it does not return */
  }
  for (int i = 0; i < n_switches; i++)
    if (switches[i] == steps) yield_to_scheduler();
}

/* ---- waiting --------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

void dlx_wait_word(void* word, uint32_t value, int64_t nanoseconds) {
  (void)nanoseconds;
  if (is_threaded) {
    pthread_mutex_lock(&lock);
    while (__atomic_load_n((uint32_t*)word, __ATOMIC_RELAXED) == value)
      pthread_cond_wait(&woken, &lock);
    pthread_mutex_unlock(&lock);
    return;
  }
  step(NULL, 0);
  process* own = &processes[current];
  if (__atomic_load_n((uint32_t*)word, __ATOMIC_SEQ_CST) != value) return;
  own->waits = word;
  yield_to_scheduler();
}

void dlx_wake_word(void* word) {
  if (is_threaded) {
    pthread_mutex_lock(&lock); /* a waiting thread compares the word under this lock */
    pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&lock);
    return;
  }
  step(NULL, 0);
  for (int i = 0; i < PROCESSES; i++)
    if (processes[i].waits == word) processes[i].waits = NULL;
}

/* ---- processes ------------------------------------------------------------------------------- */

static void fill(uint64_t frames) {
  for (uint64_t number = 1; number <= frames; number++) {
    int slot;
    do slot = dlx_ring_claim(memory, SLOTS, overwrite, 1, 1);
    while (slot < 0);
    words[slot][0] = number;
    step(words[slot], 0);
    words[slot][1] = number;
    dlx_ring_publish(memory, slot);
  }
  dlx_ring_end(memory);
}

static void read_all(int number) {
  process* own = &processes[1 + number];
  dlx_ring_join(memory, number);
  own->from = ((ring*)memory)->readers[number].wanted;
  for (;;) {
    int slot = dlx_ring_next(memory, SLOTS, number, 0, 1);
    if (slot == DLX_RING_ENDED) return;
    if (slot < 0) continue;
    uint64_t first = words[slot][0];
    step(words[slot], 0);
    HOLDS(words[slot][1] == first &&
          words[slot][0] == first); /* whole, and not changed meanwhile */
    HOLDS(dlx_ring_held(memory, number) == first && first > own->read);
    HOLDS(overwrite || first == (own->read ? own->read + 1 : own->from)); /* nothing is lost */
    own->read = first;
    dlx_ring_release(memory, number);
  }
}

static void run_process(void) {
  if (current == 0) {
    fill(FRAMES);
  } else {
    read_all(current - 1);
  }
  processes[current].has_ended = 1;
  yield_to_scheduler();
}

/* ---- orders ---------------------------------------------------------------------------------- */

static int can_run(int i) {
  process* each = &processes[i];
  return !each->has_ended && !each->is_dead && !each->waits;
}

static void start(int i) {
  static char stacks[PROCESSES][STACK];
  process* each = &processes[i];
  memset(each, 0, sizeof *each);
  getcontext(&each->context);
  each->context.uc_stack.ss_sp = stacks[i];
  each->context.uc_stack.ss_size = STACK;
  makecontext(&each->context, run_process, 0);
}

/* Run all processes once, with the switches and the death that are set; return the steps. */
static long run_once(int first) {
  memset(memory, 0, sizeof memory);
  memset(words, 0, sizeof words);
  for (int i = 0; i < PROCESSES; i++) start(i);
  steps = 0;
  int next = first, has_waited = 0;
  is_void = 0;
  for (;;) {
    for (int i = 0; i < n_switches; i++) {
      if (switches[i] != steps || !steps) continue;
      is_void |= next == targets[i] || !can_run(targets[i]); /* a shorter list has this order */
      next = targets[i];
    }
    int tries = 0;
    while (tries < PROCESSES && !can_run(next)) next = (next + 1) % PROCESSES, tries++;
    if (tries == PROCESSES) {
      int ended = 0;
      for (int i = 0; i < PROCESSES; i++) ended += processes[i].has_ended || processes[i].is_dead;
      if (ended == PROCESSES) break;
      if (processes[0].is_dead && has_waited) break; /* readers see that its lock is free */
      /* Only a death lets all wait in vain, and only once. */
      HOLDS(victim_step && steps >= victim_step && !has_waited);
      has_waited = 1;
      if (victim && processes[victim].is_dead) dlx_ring_leave(memory, victim - 1);
      for (int i = 0; i < PROCESSES; i++) processes[i].waits = NULL;
      continue;
    }
    current = next;
    swapcontext(&scheduler, &processes[next].context);
    current = -1;
    if (is_replaced && victim && processes[victim].is_dead) start(victim); /* with its number */
  }
  ring* r = (ring*)memory;
  for (int i = 1; i < PROCESSES; i++) /* what the producer left is read */
    for (int slot = 0; slot < SLOTS && !processes[i].is_dead; slot++)
      HOLDS(r->numbers[slot] < r->readers[i - 1].wanted);
  for (int i = 1; i < PROCESSES && !overwrite && !processes[0].is_dead; i++)
    HOLDS(processes[i].is_dead || processes[i].read == FRAMES || !processes[i].read);
  return steps;
}

static long runs;

/* Run with the switches so far, with a death before each later step, and with further switches. */
static void explore(int first, long from, int left, int kills) {
  long total = run_once(first);
  char some[STEPS];
  memcpy(some, is_wake, (size_t)total + 1);
  runs++;
  if (is_void) return;
  for (victim_step = 1; kills && victim_step <= total; victim_step++, runs += 2)
    for (is_replaced = 0; is_replaced < 2; is_replaced++) run_once(first);
  victim_step = 0;
  for (long at = from; left && at <= total; at++) {
    if (only_wakes && !some[at]) continue;
    for (int target = 0; target < PROCESSES; target++) {
      switches[n_switches] = at, targets[n_switches++] = target;
      explore(first, at + 1, left - 1, kills);
      n_switches--;
    }
  }
}

/* ---- threads --------------------------------------------------------------------------------- */

static uint64_t n_frames;

static void* run_thread(void* number) {
  int i = (int)(intptr_t)number;
  if (i == 0) {
    fill(n_frames);
  } else {
    read_all(i - 1);
  }
  return NULL;
}

int main(int n, char** arguments) {
  HOLDS(n > 3);
  int kills = n > 4 && !strcmp(arguments[4], "kill");
  only_wakes = n > 4 && !strcmp(arguments[4], "wakes");
  long count = atol(arguments[3]);
  overwrite = atoi(arguments[2]);
  is_threaded = !strcmp(arguments[1], "threads");
  if (is_threaded) {
    pthread_t threads[PROCESSES];
    n_frames = (uint64_t)count;
    for (int i = 0; i < PROCESSES; i++)
      HOLDS(!pthread_create(&threads[i], NULL, run_thread, (void*)(intptr_t)i));
    for (int i = 0; i < PROCESSES; i++) HOLDS(!pthread_join(threads[i], NULL));
    for (int i = 1; i < PROCESSES && !overwrite; i++) HOLDS(processes[i].read == n_frames);
    runs++;
  } else {
    for (int first = 0; first < PROCESSES; first++) explore(first, 1, (int)count, kills);
  }
  printf("%ld runs\n", runs);
  return 0;
}
